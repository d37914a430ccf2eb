"""A model most of whose layers see a window: a real server gives back what lies behind, and nobody can tell."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine import loader
from loadtest.tiny_model import build_tiny_model
from tests.driving import assert_same_tokens, plain_greedy
from tests.serving import ServerProcess, serving

BLOCK_SIZE, WINDOW, NUM_NEW = 16, 64, 1200
SLIDING = {"model_type": "gemma3_text", "sliding_window": WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 6}
PROMPT = [(37 * i) % 40_000 + 100 for i in range(700)]
GREEDY = {"temperature": 0, "ignore_eos": True, "return_tokens": True}


@pytest.fixture(scope="module")
def sliding_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sliding"
    return build_tiny_model(model_dir, folder, query_pre_attn_scalar=16, **SLIDING)


@pytest.fixture(scope="module")
def sliding(sliding_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("sliding")
    settings = {"MODEL": str(sliding_dir), "CTX_SIZE": "8192", "N_PARALLEL": "4", "KV_BLOCK_SIZE": str(BLOCK_SIZE)}
    with serving(folder, KV_CACHE_BUDGET="4M", **settings) as server:
        yield server


def live_blocks(server: ServerProcess) -> int:
    found = re.search(r"^mlxcel_cache_pool_paged_blocks_live ([0-9.]+)$", server.http.get("/metrics").text, re.M)
    assert found is not None
    return int(float(found[1]))


def test_a_long_answer_holds_its_windows_and_no_more(sliding: ServerProcess, sliding_dir: Path) -> None:
    assert "4 of 6 layers see the last 64 tokens and keep no more" in sliding.log.read_text()
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(live_blocks(sliding))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    response = sliding.post("/completion", {"prompt": PROMPT, "n_predict": NUM_NEW, **GREEDY})
    done.set()
    watcher.join()
    assert response.status_code == 200, response.text
    tokens = response.json()["tokens"]
    model = loader.load(sliding_dir, "auto")
    loader.read_weights(model)
    want, logits = plain_greedy(model.model, PROMPT, 100)
    assert_same_tokens(tokens[:100], want, logits)
    # Two layers of six are a group that sees all; two groups keep a window, and a block or two on either side.
    num_tokens = len(PROMPT) + NUM_NEW
    most = num_tokens // BLOCK_SIZE + 1 + 2 * (WINDOW // BLOCK_SIZE + 3)
    assert seen[-1] <= most < 3 * num_tokens // BLOCK_SIZE
    assert max(seen) >= len(PROMPT) // BLOCK_SIZE
    assert live_blocks(sliding) == 0


def test_what_follows_on_an_answer_is_not_cold(sliding: ServerProcess) -> None:
    """Of the prompt before it only the last window is there in the layers that see one."""
    first = sliding.post("/completion", {"prompt": PROMPT, "n_predict": 300, **GREEDY}).json()
    longer = [*PROMPT, *first["tokens"], 5, 6, 7]
    again = sliding.post("/completion", {"prompt": longer, "n_predict": 40, **GREEDY}).json()
    assert again["timings"]["cache_n"] >= len(longer) - 4 - BLOCK_SIZE
    cold = sliding.post("/completion", {"prompt": longer, "n_predict": 40, **GREEDY, "cache_prompt": False}).json()
    assert cold["timings"]["cache_n"] == 0
    assert cold["tokens"] == again["tokens"]


def test_many_at_once_draw_as_alone(sliding: ServerProcess) -> None:
    prompts = [PROMPT[i * 50 : i * 50 + 90 + 40 * i] for i in range(6)]
    bodies = [{"prompt": prompt, "n_predict": 200, **GREEDY} for prompt in prompts]
    alone = [sliding.post("/completion", body).json()["tokens"] for body in bodies]
    together: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        together[index] = sliding.post("/completion", bodies[index]).json()["tokens"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = [together[i][:100] == tokens[:100] for i, tokens in enumerate(alone)]
    assert sum(same) >= len(same) - 1, "but for a tie"
    assert live_blocks(sliding) == 0
