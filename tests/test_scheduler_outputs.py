"""Ids of rows, which are written late and read at once."""

import random

import numpy as np

from scheduler.outputs import Outputs


def test_ids_are_those_of_a_naive_model_whoever_comes_goes_and_looks() -> None:
    """Batches that stay for 1 to 40 steps, rows longer than what stays resident, slots that are used again."""
    dice, longest = random.Random(5), 40_000
    outputs = Outputs(6, longest)
    wanted: dict[int, tuple[int, list[int]]] = {}  # slot → ids known when it came, ids since
    for version in range(1, 301):
        slot = dice.randrange(6)
        if slot in wanted:
            outputs.settle()
            outputs.clear_row(slot, longest)
            del wanted[slot]
        else:
            wanted[slot] = (dice.randrange(1, 50), [])
            outputs.start_row(slot, wanted[slot][0])
        present = dice.sample(sorted(wanted), len(wanted))
        if not present:
            continue
        index = np.array(present, np.intp)
        for _ in range(dice.randrange(1, 40)):
            ids = [dice.randrange(1, 1000) for _ in present]
            positions = outputs.append_ids(index, version, np.array(ids, np.int32))
            assert positions.tolist() == [wanted[s][0] + len(wanted[s][1]) for s in present]
            for s, i in zip(present, ids, strict=True):
                wanted[s][1].append(i)
        looked = dice.choice(present)
        assert np.frombuffer(outputs.generated(looked), np.int32).tolist() == wanted[looked][1]
        assert outputs.known[looked] == sum((wanted[looked][0], len(wanted[looked][1])))


def test_room_for_the_longest_rows_takes_no_memory_before_it_is_used() -> None:
    """4 096 slots of ten million ids: 164 GB."""
    outputs = Outputs(4096, 10_000_000)
    outputs.start_row(4095, 3)
    outputs.append_ids(np.array([4095], np.intp), 1, np.array([7], np.int32))
    assert outputs.generated(4095) == np.array([7], np.int32).tobytes()
