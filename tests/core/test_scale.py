"""The rows that benchmarks make: the same wherever they are asked for, in episodes."""

import numpy as np

from tests.bench import generate


def test_the_generator_says_the_same_of_a_row_wherever_it_is_asked() -> None:
    rows = np.array([0, 999, 1000, 4_999_999, 99_999_999])
    together = generate.rows_of(generate.STATE, rows)
    for place, row in enumerate(rows.tolist()):
        alone = generate.rows_of(generate.STATE, np.array([row]))
        assert all(np.array_equal(together[name][place], alone[name][0]) for name in together)


def test_the_generator_makes_episodes() -> None:
    columns = generate.rows_of(generate.STATE, np.arange(200_000))
    step, done = columns["episode_step"], columns["done"]
    ends = np.nonzero(done)[0]
    assert set(np.unique(done)) == {0, 1, 2}
    # A step follows the one before, but for an episode's first, which follows an end and holds placeholders.
    assert np.array_equal(step[1:], np.where(done[:-1] > 0, 0, step[:-1] + 1))
    firsts = step == 0
    assert not columns["action"][firsts].any()
    assert not columns["reward"][firsts].any()
    assert (step[ends[done[ends] == 2]] >= 1000).all()
    assert len(np.unique(columns["observation"][:5000], axis=0)) == 5000
