"""Self-calibration at the first call of a group, on CPU processes with invented measurements."""

from support import self_calibration_ranks as ranks

from weft.launch import Pool


def test_ranks_measure_once_and_plan_by_the_first_ranks_numbers(pool: Pool) -> None:
    first, *others = pool.run(ranks.at_first_calls, ranks=3, timeout_s=100)
    assert first["measured"] == [1, 1]
    known = first["known"]
    derived = ranks.Measured(known["machine"], 0, 3).base
    assert known["copy_bytes_per_us"] == derived.copy_bytes_per_us
    assert known["host_step_us"] == derived.host_step_us
    for other in others:
        assert other == {**first, "rank": other["rank"]}
