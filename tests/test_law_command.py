"""scripts/check_law.py: the law held against the demo model, by the command that people call."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_law import count_equal
from tests.builders import GREEDY
from tests.pair import Story

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("demo_manifest")
def test_the_law_holds_for_the_demo_model(tmp_path: Path) -> None:
    """Both dtypes; prompts shorter than a page and longer than a KV block, a chat and code."""
    prompts = tmp_path / "prompts"
    chat = "<|im_start|>user Write a haiku about the sea.<|im_end|>"
    prompts.write_text(f"The sky is\n{'red green blue ' * 24}\n{chat}\nThe capital of France is\ndef fibonacci(n):\n")
    command = [sys.executable, "scripts/check_law.py", "--prompts", str(prompts), "--tokens", "12", "--page-size", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "the law holds"
    assert sum("60/60 bitwise equal" in line for line in lines) == 18
    assert sum("5/5 sequences equal" in line for line in lines) == 1


def make_story(tokens: list[int], digests: dict[int, list[bytes]]) -> Story:
    story = Story((1, 2), GREEDY, tokens=tokens)
    story.digests.update(digests)
    return story


def test_one_different_logit_is_counted() -> None:
    """A recomputation that differs counts too, and so does another token from the same logits."""
    wanted = make_story([7, 8, 9], {2: [b"a"], 3: [b"b"], 4: [b"c"]})
    assert count_equal([make_story([7, 8, 9], {2: [b"a", b"a"], 3: [b"b"], 4: [b"c"]})], [wanted]) == 3
    assert count_equal([make_story([7, 8, 9], {2: [b"a"], 3: [b"x"], 4: [b"c"]})], [wanted]) == 2
    assert count_equal([make_story([7, 8, 9], {2: [b"a", b"x"], 3: [b"b"], 4: [b"c"]})], [wanted]) == 2
    assert count_equal([make_story([7, 8, 0], {2: [b"a"], 3: [b"b"], 4: [b"c"]})], [wanted]) == 2
    assert count_equal([make_story([7], {2: [b"a"]})], [wanted]) == 1
