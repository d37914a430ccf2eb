"""The wiring: what settings and a model's own files come to, and one start with the real model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from app import runtime
from app.errors import StartError, Unavailable
from app.request import SamplingParams
from app.runtime import Runtime
from app.scheduler.recording import from_json
from app.scheduler.replay import replay
from app.service import Ask
from app.settings import Settings
from ops.families.tiny import build, config_of


def window(ctx_size: int | None, model_window: int = 8192, **settings: Any) -> int:
    loaded: Any = SimpleNamespace(window=model_window)
    return runtime._window(Settings(ctx_size=ctx_size, **settings), loaded)


def test_window_is_the_models_unless_a_total_is_set() -> None:
    assert window(None) == 8192
    assert window(8192, n_parallel=4) == 2048
    assert window(4 * 8192, n_parallel=4) == 8192


def test_window_above_the_models_names_both_numbers() -> None:
    with pytest.raises(StartError, match=r"MLXCEL_CTX_SIZE=40000 means 10000 tokens a slot.* 8192$"):
        window(40000, n_parallel=4)


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, SamplingParams(temperature=1.0)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, SamplingParams(temperature=0.6, top_p=0.9, top_k=20)),
        ({"temperature": None, "top_k": None, "min_p": 0.1}, SamplingParams(min_p=0.1)),
        ({"do_sample": True, "temperature": 0.2, "eos_token_id": 2}, SamplingParams(temperature=0.2)),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05},
            SamplingParams(temperature=0.0, repetition_penalty=1.05),
        ),
    ],
)
def test_absent_fields_mean_the_models_generation_config(generation: dict[str, Any], sampling: SamplingParams) -> None:
    assert runtime._default_sampling(generation) == sampling


def test_a_model_is_called_after_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    imported = tmp_path / "tiny-0123456789ab"
    for asked, path, name in (
        ("embedded", imported, "smollm2-135m-instruct"),
        (str(tmp_path / "tiny.gguf"), imported, "tiny"),
        (str(tmp_path / "my-model"), tmp_path / "my-model", "my-model"),
        (f"{tmp_path}/my-model/.", tmp_path / "my-model", "my-model"),
        ("org/tiny-4bit", tmp_path / "snapshots" / "9f8e7d", "org/tiny-4bit"),
    ):
        assert runtime._name(Settings(model=asked), path) == name


def test_a_model_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    async def body() -> None:
        started = Runtime(Settings(model=str(tmp_path), cache_dir=tmp_path, blas="none"))
        with pytest.raises(StartError, match=r"config\.json"):
            await started.start()
        await started.stop()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ctx_size": 10**6}, "MLXCEL_CTX_SIZE=1000000 means 250000 tokens a slot"),
        ({"kv_cache_budget": 1 << 20}, r"KV pool too small: budget 1\.0 MiB.*at least 512 tokens"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_before_its_weights_are_read(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    from app.engine import loader

    async def body() -> None:
        started = Runtime(Settings(model=str(model_dir), cache_dir=tmp_path, blas="none", **settings))
        with pytest.raises(StartError, match=said):
            await started.start()
        await started.stop()

    monkeypatch.setattr(loader, "read_weights", lambda _: pytest.fail("the weights are being read"))
    asyncio.run(body())


def test_a_start_with_the_real_model(model_dir: Path, tmp_path: Path) -> None:
    async def body() -> None:
        settings = Settings(
            model=str(model_dir),
            model_alias="tiny,other",
            cache_dir=tmp_path,
            ctx_size=4096,
            kv_cache_budget="32M",
            blas="none",
        )
        started = Runtime(settings)
        service = started.service
        with pytest.raises(Unavailable, match="Loading model"):
            await service.complete(["1 2 3"], Ask())
        await started.start()
        assert service.status == "ready"
        card = service.card
        assert card.ids == ("tiny", "other")
        assert card.n_ctx == card.most_tokens == 704  # a window is 1024, of which the budget holds 11 blocks
        assert card.props["build_info"] == f"mlxcel-{runtime.VERSION}-{settings.fingerprint}"
        assert 0 < card.most_tokens * card.bytes_per_block <= 32 * 2**20 * service.snapshot().pool.block_size
        assert len(service.snapshot().slots) == settings.n_parallel
        completion = await service.complete(["1 2 3 4 5 6"], Ask(SamplingParams(temperature=0.0), max_tokens=2))
        assert "".join([delta.text async for delta in completion]).startswith(" 7")
        metrics = started.metrics.render().decode()
        assert 'mlxcel_tick_seconds_count{kind="prefill"} 1.0' in metrics
        assert "mlxcel_request_ttft_seconds_count 1.0" in metrics
        await started.drain(1.0)
        await started.stop()
        assert not started.failed.is_set()

    asyncio.run(body())


@pytest.mark.parametrize(("deterministic", "lookahead"), [(False, "off"), (False, "on"), (True, "off")])
def test_rows_propose_where_that_is_asked_for_and_not_in_deterministic_mode(
    deterministic: bool, lookahead: str, tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bias makes a text that repeats itself: one token."""
    caplog.set_level("INFO", "mlxcel.runtime")

    async def body() -> str:
        settings = Settings(
            model=str(tiny_model_dir),
            cache_dir=tmp_path,
            ctx_size=2048,
            kv_cache_budget="8M",
            draft_kind="prompt-lookup",
            sdpa_deterministic=deterministic,
            decode_lookahead=lookahead,
            blas="none",
        )
        started = Runtime(settings)
        await started.start()
        assert started.service.card.speculative is not deterministic
        sampling = SamplingParams(temperature=0.0, logit_bias=((50, 100.0),))
        completion = await started.service.complete(["Once more:"], Ask(sampling, max_tokens=40))
        text = "".join([delta.text async for delta in completion])
        assert text == started.service.detokenize([50] * 40)
        assert completion.usage.completion_tokens == 40
        counters = started.service.snapshot().counters
        assert (counters.spec_accepted_tokens > 20) is not deterministic
        assert (counters.decode_steps < 12) is not deterministic
        assert counters.decode_tokens == 39
        assert replay(from_json(json.loads(json.dumps(await started.service.recording())))).difference is None
        await started.stop()
        return caplog.text

    log = asyncio.run(body())
    assert ("MLXCEL_DRAFT_KIND=prompt-lookup has no effect" in log) is deterministic
    assert f"Model {tiny_model_dir.name} decode path: native batched forward (ragged paged)" in log


@pytest.mark.parametrize(("family", "path"), [("jamba", "dense native batched"), ("llama4", "per-row fallback")])
def test_a_model_without_blocks_is_served_and_its_chats_go_on(
    family: str, path: str, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"vocab_size": 49152, "max_position_embeddings": 512}
    weights = dict(tree_flatten(build(family, **sizes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config_of(family, **sizes) | {"eos_token_id": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, folder / name)

    async def body() -> None:
        settings = Settings(
            model=str(folder), cache_dir=tmp_path, kv_cache_budget="64M", draft_kind="prompt-lookup", blas="none"
        )
        started = Runtime(settings)
        await started.start()
        service = started.service
        ask = Ask(SamplingParams(temperature=0.0), max_tokens=6, ignore_eos=True)
        story = "Tell me about a cat called Oscar, who lives in a very small house by the sea."
        question = {"role": "user", "content": story}
        answers = await asyncio.gather(*(said(service, [question], ask) for _ in range(3)))
        assert len({text for text, _ in answers}) == 1
        answer = {"role": "assistant", "content": answers[0][0]}
        _, cached = await said(service, [question, answer, {"role": "user", "content": "And then?"}], ask)
        assert cached > 20
        metrics = started.metrics.render().decode()
        assert f'decode_path="{path}"' in metrics
        assert 'mlxcel_prompt_cache_misses_total{reason="off"} 0.0' in metrics
        assert service.card.props["decode_path"] == path
        assert not service.card.speculative
        await started.drain(1.0)
        await started.stop()

    async def said(service: Any, messages: list[dict[str, Any]], ask: Ask) -> tuple[str, int]:
        completion = await service.chat(messages, ask, {})
        return "".join([delta.text async for delta in completion]), completion.usage.cached_tokens

    with caplog.at_level("INFO", "mlxcel"):
        asyncio.run(body())
    assert f"decode path: {'per-row fallback (aggregate' if family == 'llama4' else 'native batched'}" in caplog.text
    assert "MLXCEL_DRAFT_KIND=prompt-lookup has no effect on this decode path" in caplog.text
