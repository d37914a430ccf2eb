"""The command and the server give the same greedy answers in deterministic mode."""

from __future__ import annotations

from pathlib import Path

from loadtest.engine_parity import PROMPTS, answers


def test_run_says_what_the_server_says(model_dir: Path, tmp_path: Path) -> None:
    pairs = list(answers(model_dir, [PROMPTS[0], PROMPTS[8], PROMPTS[19]], 8, tmp_path, BLAS_THREADS="1"))
    assert [server for server, _ in pairs] == [command for _, command in pairs]
    assert pairs[0][0].text == "The capital of France is Paris."
    assert all(server.num_new > 1 for server, _ in pairs)
