"""`quintet serve` with fake stages and a made-up model."""

import argparse
import sys

from engine import supervisor
from engine.cli import serve
from engine.documents import MODULES
from proto.model import ModelConfig, ModelManifest

MANIFEST = ModelManifest(
    name="fake",
    source="/fake",
    weight_format="none",
    weight_files=(),
    config=ModelConfig(
        family="llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        max_position_embeddings=64,
    ),
    tokenizer_json="/fake/tokenizer.json",
)


def main() -> int:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", "--model", "fake", *sys.argv[1:]])
    vars(supervisor)["prepare_model"] = lambda *_args, **_options: MANIFEST
    return supervisor.serve(serve.config_of(args), dict.fromkeys(MODULES, "fake_stage"))


if __name__ == "__main__":
    sys.exit(main())
