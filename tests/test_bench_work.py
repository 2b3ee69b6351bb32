"""What `quintet bench` asks for: lengths, ids, mixes and arrival times."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.bench.work import PRESETS, Job, Work, poisson_arrivals, preset_work, work_of_file

VOCAB = 1000


def take(work: Work, count: int, seed: int = 0) -> list[Job]:
    return list(itertools.islice(work.jobs(VOCAB, seed), count))


@pytest.mark.parametrize(("name", "prompt", "output"), [("chat", 512, 256), ("agent", 8392, 100), ("batch", 1024, 128)])
def test_presets_have_the_lengths_that_their_names_promise(name: str, prompt: int, output: int) -> None:
    for job in take(preset_work(name), 3):
        assert (job.work_class, len(job.prompt), job.output_tokens) == (name, prompt, output)
        assert all(0 <= token < VOCAB for token in job.prompt)


def test_agents_share_their_prefix_and_nothing_else() -> None:
    one, two = take(preset_work("agent"), 2)
    shared = PRESETS["agent"].prefix_tokens
    assert one.prompt[:shared] == two.prompt[:shared]
    assert one.prompt[shared:] != two.prompt[shared:]


def test_equal_seeds_ask_for_equal_requests_and_others_do_not() -> None:
    mix = preset_work("chat,batch,agent")
    assert take(mix, 20) == take(mix, 20)
    assert take(mix, 20) != take(mix, 20, seed=1)


def test_a_mix_keeps_its_weights() -> None:
    drawn = Counter(job.work_class for job in take(preset_work("chat=3,batch=1"), 2000))
    assert drawn["chat"] + drawn["batch"] == 2000
    assert 1400 < drawn["chat"] < 1600  # 1500 ± 5 standard deviations of a binomial


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("chats", "must name chat, agent, batch or a mix of these, got 'chats'"),
        ("chat=x", "must be a number"),
        ("chat=0", "above 0"),
        ("chat=-1", "above 0"),
    ],
)
def test_a_bad_mix_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        preset_work(text)


def test_lengths_of_a_file_are_drawn_in_their_proportion(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_tokens": 3, "output_tokens": 5}\n'
        '{"prompt_tokens": 3, "output_tokens": 5}\n\n'
        '{"prompt_tokens": 7, "output_tokens": 2, "work_class": "batch"}\n'
    )
    drawn = Counter((job.work_class, len(job.prompt), job.output_tokens) for job in take(work_of_file(path), 900))
    assert set(drawn) == {("chat", 3, 5), ("batch", 7, 2)}
    assert 520 < drawn["chat", 3, 5] < 680  # 600 ± 5 standard deviations


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt_tokens": 0, "output_tokens": 5}', "line 2: .*>= 1.*prompt_tokens"),
        ('{"prompt_tokens": 999999999999, "output_tokens": 1}', "line 2: .*<= 10000000.*prompt_tokens"),
        ('{"prompt_tokens": 1}', "line 2: .*output_tokens"),
        ('{"prompt_tokens": 1, "output_tokens": 5, "input": 3}', "line 2: .*input"),
        (
            '{"prompt_tokens": 1, "output_tokens": 5, "work_class": "chatty"}',
            "line 2: work_class must be one of .* got 'chatty'",
        ),
        ("no JSON", "line 2: "),
    ],
)
def test_a_bad_line_of_lengths_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 3, "output_tokens": 5}\n' + line + "\n")
    with pytest.raises(ValueError, match=complaint):
        work_of_file(path)


def test_a_file_without_lengths_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        work_of_file(path)


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps with the mean 1/rate and, as only the exponential distribution, a deviation equal to the mean."""
    times = np.array(poisson_arrivals(8.0, 20_000, seed=0))
    gaps = np.diff(times)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    # Counts in equal intervals are as large as they vary.
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.15)


def test_arrivals_repeat_with_their_seed() -> None:
    assert poisson_arrivals(2.0, 10, seed=4) == poisson_arrivals(2.0, 10, seed=4)
    assert poisson_arrivals(2.0, 10, seed=4) != poisson_arrivals(2.0, 10, seed=5)
