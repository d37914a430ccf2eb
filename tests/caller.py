"""A model directory for the tests of clients: a llama that calls a tool where one is offered, and then says what it is
told to say. Its weights are written by hand: each token has one successor, whatever came before it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

END = "<|im_end|>"
# The pieces are tokens of their own; which chain begins is for the template to say, by its last token.
CHAINS = (
    ("<|ask|>", "<tool_call>\n", '{"name": "get_weather", ', '"arguments": {"city": "Paris"}}', "\n</tool_call>", END),
    ("<|tell|>", "It rains", " in", " Paris.", END),
)
SENTENCE = "It rains in Paris."
TEMPLATE = """\
{% if tools %}<|im_start|>system
Call a tool as <tool_call>JSON</tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if tools and messages[-1].role != 'tool' %}<|ask|>{% else %}<|tell|>{% endif %}"""
WIDTH = 64
CERTAIN = 10.0  # times the length of a normed row: the odds of another successor are e^-80


def build_caller(embedded: Path, folder: Path) -> Path:
    """Write the model to ``folder``, which must not exist. ``embedded`` is the embedded model as a directory."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(embedded / "tokenizer.json"))
    pieces = [piece for chain in CHAINS for piece in chain[:-1]]
    tokenizer.add_tokens([AddedToken(piece, special=piece[:2] == "<|", normalized=False) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((embedded / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((embedded / "config.json").read_text()) | {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": WIDTH // 2,
        "rope_traditional": False,
        "tie_word_embeddings": False,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    config.pop("quantization", None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(value)  # so that a row of the residual stream is its token's embedding
    # Each piece has a direction of its own; all other tokens share the last one, and end the turn.
    embedding = mx.zeros((config["vocab_size"], WIDTH))
    embedding[:, WIDTH - 1] = 1.0
    head = mx.zeros((config["vocab_size"], WIDTH))
    head[tokenizer.token_to_id(END), WIDTH - 1] = CERTAIN
    for direction, (piece, successor) in enumerate(pair for chain in CHAINS for pair in pairwise(chain)):
        row = mx.zeros((WIDTH,))
        row[direction] = 1.0
        embedding[tokenizer.token_to_id(piece)] = row
        head[tokenizer.token_to_id(successor), direction] = CERTAIN
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
