"""The commands that answer, import and list, as processes: what they write, and how they end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from app.cli import COMMANDS, main
from app.engine.gguf import embedded_gguf
from tests.commanding import CTRL_C, Terminal, environment, greedy, mlxcel
from tests.serving import ROOT

GREEDY = ("--temperature", "0", "--max-tokens", "12")
ENDLESS = ("run", "-p", "Tell me everything.", "--temperature", "0")
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def escaping_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says nothing but the escape character."""
    import mlx.core as mx

    folder = tmp_path_factory.mktemp("models") / "escaping"
    shutil.copytree(tiny_model_dir, folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    file = str(folder / "model.safetensors")
    weights = {name: mx.zeros_like(array) for name, array in mx.load(file).items()}
    # With every layer silent, the logit of a token is the sum of its embedding.
    embeddings = mx.ones_like(weights["model.embed_tokens.weight"])
    embeddings[vocabulary["\u011b"]] = 2.0  # how byte-level vocabularies write the byte 0x1b
    weights |= {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": mx.ones_like(weights["model.norm.weight"]),
    }
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return folder


def refusal(*arguments: str, **settings: str) -> str:
    """The one line on stderr of a command that fails before anything is loaded."""
    done = mlxcel(*arguments, **settings)
    assert (done.returncode, done.stdout) == (1, b"")
    line = done.stderr.decode()
    assert line.startswith("mlxcel: ")
    assert line.count("\n") == 1
    return line


def test_run_prints_the_answer_and_nothing_else(tiny_model_dir: Path) -> None:
    (expected,) = greedy(tiny_model_dir, 12, QUESTION)
    for given in (
        mlxcel("run", "-p", "Hi", *GREEDY, MODEL=str(tiny_model_dir)),
        mlxcel("run", *GREEDY, "--model", str(tiny_model_dir), piped=b"Hi\n"),
    ):
        assert given.returncode == 0, given.stderr
        assert given.stdout.decode() == expected + "\n"
        assert given.stderr == b""


def test_json_has_text_end_usage_and_timings(tiny_model_dir: Path) -> None:
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    (expected,) = greedy(tiny_model_dir, 12, system)
    done = mlxcel("run", "-p", "-", *GREEDY, "--system", "Be brief.", "--json", piped=b"Hi", MODEL=str(tiny_model_dir))
    said = json.loads(done.stdout)
    assert sorted(said) == ["finish_reason", "text", "timings", "usage"]
    assert (said["text"], said["finish_reason"]) == (expected, "length")
    usage = said["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert said["timings"]["predicted_n"] == 12
    assert said["timings"]["predicted_ms"] > 0


def test_generate_goes_on_with_the_text_itself(tiny_model_dir: Path) -> None:
    (expected,) = greedy(tiny_model_dir, 12, "Hi")
    done = mlxcel("generate", "-p", "Hi", *GREEDY, "--json", MODEL=str(tiny_model_dir))
    said = json.loads(done.stdout)
    assert said["text"] == expected
    assert said["usage"]["prompt_tokens"] == 1


def test_a_seed_repeats_an_answer(tiny_model_dir: Path) -> None:
    """Without one, draws at temperature 1 from random weights would not come again."""
    first, again = (
        mlxcel("run", "-p", "Hi", "--seed", "1", "--max-tokens", "8", MODEL=str(tiny_model_dir)).stdout
        for _ in range(2)
    )
    assert first == again != b""


def test_the_servers_settings_serve_a_single_person_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    """More slots than one, a total context for all of them, keys: none of it stands in the way."""
    settings = {"N_PARALLEL": "8", "MAX_BATCH_SIZE": "4", "CTX_SIZE": "65536", "API_KEY_FILE": str(tmp_path / "none")}
    done = mlxcel("run", "-p", "Hi", *GREEDY, MODEL=str(tiny_model_dir), **settings)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "-p", "Hi", "--temperature", "3"), "temperature: must be at most 2, got 3"),
        (("run", "-p", "Hi", "--max-tokens", "0"), "max_tokens: must be at least 1, got 0"),
        (("run", "-p", "Hi", "--seed", "x"), "argument --seed: invalid int value: 'x'; see mlxcel run --help"),
        (("run", "-p", "Hi", "--max-token", "3"), "did you mean --max-tokens?"),
        (("run", "-p", "Hi", "--model", "/nowhere"), "MLXCEL_MODEL=/nowhere"),
        (("run",), "the prompt is empty"),
        (("generate", "-p", ""), "the prompt is empty"),
        (("import", "model.safetensors"), "there is no such file"),
        (("import", "README.md"), "is no .gguf file"),
        (("import", "app"), "is a folder, which needs no import"),
        (("simulate", "--rate", "0"), "argument --rate: '0' must be a number, from 1e-06 on"),
        (("simulate", "--rate", "1e-320"), "argument --rate"),
        (("simulate", "--think", "inf"), "argument --think: 'inf' must be a number, from 0 on"),
        (("simulate", "--watermark", "2"), "argument --watermark: '2' must be a number, from 0 to 1"),
        (("simulate", "--slots", "0"), "argument --slots: '0' must be a whole number, at least 1"),
        (("simulate", "--hosts", "5-2"), "argument --hosts: '5-2' must be a number or a range like 2-8"),
        (("simulate", "--cost", "README.md"), "README.md: the file is not JSON"),
        (("simulate", "--cost", "/nowhere/cost"), "not one of m1-ultra-8b, and no file"),
        (("replay", "README.md"), "README.md is no recording: it is not JSON"),
        (("import", "/nowhere.gguf"), "there is no such file"),
        (("rnu",), "invalid choice"),
        (("run", "Hi"), "unexpected argument Hi"),
        (("simulate", "--trace", "/dev/null"), "/dev/null has no requests in it"),
        (("simulate", "--generate", "poisson", "--requests", "3", "--blocks", "1"), "every request is refused"),
        (("simulate", "--generate", "poisson", "--prefixes", "-1"), "argument --prefixes"),
        (
            ("simulate", "--save-cost", "/nowhere/cost", "--generate", "poisson"),
            "/nowhere/cost cannot be written: there is no folder /nowhere",
        ),
    ],
)
def test_a_refusal_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("command", [("models",), ("serve", "--check")])
def test_an_output_that_cannot_be_written_is_one_line(command: tuple[str, ...]) -> None:
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m app {' '.join(command)} >/dev/full"], capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"mlxcel: No space left on device\n")
    done = subprocess.run(["sh", "-c", f"{sys.executable} -m app {' '.join(command)} >&-"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_piped_in_has_to_be_text() -> None:
    done = mlxcel("run", piped=b"caf\xe9 au lait")
    assert done.returncode == 1
    assert b"no UTF-8 text" in done.stderr


def test_a_prompt_is_asked_for_where_there_is_no_conversation() -> None:
    for arguments, said in (
        (("generate",), "there is no text to continue"),
        (("run", "--json"), "a conversation needs a terminal and takes no --json"),
    ):
        with Terminal(*arguments) as terminal:
            assert terminal.exit_code() == 1
            assert said in terminal.seen


def test_a_terminal_shows_the_loading_and_takes_it_away(tiny_model_dir: Path) -> None:
    (expected,) = greedy(tiny_model_dir, 12, QUESTION)
    with Terminal("run", "-p", "Hi", *GREEDY, MODEL=str(tiny_model_dir)) as terminal:
        assert terminal.exit_code() == 0
    loading, _, answer = terminal.seen.rpartition("\r" + " " * 4)
    assert loading.startswith("\rstarting (0 s)")
    assert "\n" not in loading
    assert answer.lstrip(" ").removeprefix("\r") == expected.replace("\n", "\r\n") + "\r\n[length]\r\n"
    assert "\x1b" not in terminal.seen


@pytest.mark.parametrize("command", ["run", "generate"])
def test_no_escape_sequence_of_a_model_reaches_the_terminal(command: str, escaping_model_dir: Path) -> None:
    with Terminal(command, "-p", "Hi", *GREEDY, MODEL=str(escaping_model_dir)) as terminal:
        assert terminal.exit_code() == 0
    assert "\\x1b" * 12 in terminal.seen
    assert "\x1b" not in terminal.seen
    done = mlxcel(command, "-p", "Hi", *GREEDY, "--json", MODEL=str(escaping_model_dir))
    assert b"\x1b" not in done.stdout
    assert json.loads(done.stdout)["text"] == "\x1b" * 12


def test_ctrl_c_ends_one_answer_with_what_there_was(tiny_model_dir: Path) -> None:
    with Terminal(*ENDLESS, MODEL=str(tiny_model_dir)) as terminal:
        terminal.expect("\r ")  # the line about loading goes
        terminal.expect_more(200)
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 130
    assert terminal.seen.endswith("\n[cancelled]\r\n")
    assert "Traceback" not in terminal.seen


def test_a_reader_that_leaves_ends_the_command(tiny_model_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app", *ENDLESS],
        cwd=ROOT,
        env=environment({"MODEL": str(tiny_model_dir)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10)
        process.stdout.close()
        try:
            assert process.wait(60) == 141
        finally:
            process.send_signal(signal.SIGKILL)
        assert process.stderr.read() == b""


def test_an_import_is_listed_and_made_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    assert mlxcel("models", CACHE_DIR=folder).stderr.decode() == f"no models in {folder}\n"
    first = mlxcel("import", str(embedded_gguf()), CACHE_DIR=folder)
    assert first.returncode == 0, first.stderr
    target = Path(first.stdout.decode().removesuffix("\n"))
    assert target.parent == Path(folder)
    assert (target / "config.json").is_file()
    stamp = target.stat().st_mtime_ns
    assert mlxcel("import", str(embedded_gguf()), CACHE_DIR=folder).stdout == first.stdout
    assert target.stat().st_mtime_ns == stamp

    (target.parent / "half-0123456789ab.partial").mkdir()
    (target.parent / "recordings").mkdir()
    whole, half = json.loads(mlxcel("models", "--json", CACHE_DIR=folder).stdout)
    assert (whole["name"], whole["path"], whole["kind"]) == (embedded_gguf().stem, str(target), "llama, 4 bits")
    assert whole["size_bytes"] == sum(file.stat().st_size for file in target.iterdir())
    assert (half["name"], half["size_bytes"], half["kind"]) == ("half", 0, "import not finished")
    lines = mlxcel("models", CACHE_DIR=folder).stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == [whole["name"], "half"]
    assert lines[0].endswith(str(target))


def test_the_version_is_told() -> None:
    done = mlxcel("--version")
    assert done.returncode == 0
    assert done.stdout.decode() == f"mlxcel {metadata.version('mlxcel')}\n"


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines() if line[:4] == "    " and line[4:5].strip()] == list(COMMANDS)
