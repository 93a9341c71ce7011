"""Which schedule to take: candidates, what each would cost, the choice and why. Needs no torch.

    weft.plan.choose(problem, model)                                    the choice, remembered
    with weft.plan.use("shard[chunks=2,send=in_turn,by=dma]"): ...           pinned
    print(weft.plan.explain("all_gather_matmul", M=16384, N=8192, K=4096, ranks=2))

A choice is a function of shape, model and registered builders, so that all ranks come to the same one.
"""

from weft.plan.autotune import autotune, promising
from weft.plan.calibration import Calibration, Measure, calibrate, calibrated
from weft.plan.choose import Choice, NoOverlapWarning, choose
from weft.plan.explain import Explanation, explain, explanation, machine_and_model
from weft.plan.heuristic import static_pick
from weft.plan.pin import pinned, use
from weft.plan.predict import MODES, Mode, Row

__all__ = [
    "MODES", "Calibration", "Choice", "Explanation", "Measure", "Mode", "NoOverlapWarning", "Row", "autotune", "calibrate",
    "calibrated", "choose", "explain", "explanation", "machine_and_model", "pinned", "promising", "static_pick", "use",
]  # fmt: skip
