"""The planner predicts the times of all candidates, and chooses the fastest. This package does not import torch.

    weft.plan.choose(problem, model)                                    the choice, cached
    with weft.plan.use("shard[chunks=2,send=in_turn,by=dma]"): ...      pins a schedule
    with weft.plan.use("autotune"): ...                                 measures at the first call of a shape, and caches
    with weft.plan.use("heuristic"): ...                                uses the schedule of FiCCO's static heuristic
    print(weft.plan.explain("all_gather_matmul", M=16384, N=8192, K=4096, ranks=2))

A choice depends only on the shape, the model, the registered builders and, if given, measured times.
"""

from weft.plan.autotune import autotune, candidates_from_outside, from_outside, known_times, promising
from weft.plan.calibration import Calibration, Measure, calibrate
from weft.plan.choose import Choice, NoOverlapWarning, choose
from weft.plan.compare import Comparison, comparison
from weft.plan.explain import Explanation, explain, explanation, machine_and_model
from weft.plan.heuristic import pick_here, static_pick
from weft.plan.nearby import names_near, octave, octave_of, typical
from weft.plan.pin import AUTOTUNE, HEURISTIC, names_schedule, pinned, pinned_around, use
from weft.plan.predict import MODES, Row
from weft.plan.source import calibrated
from weft.sim import Mode

__all__ = [
    "AUTOTUNE", "HEURISTIC", "MODES", "Calibration", "Choice", "Comparison", "Explanation", "Measure", "Mode",
    "NoOverlapWarning", "Row", "autotune", "calibrate", "calibrated", "candidates_from_outside", "choose",
    "comparison", "explain", "explanation", "from_outside", "known_times", "machine_and_model", "names_near",
    "names_schedule", "octave", "octave_of", "pick_here", "pinned", "pinned_around", "promising", "static_pick",
    "typical", "use",
]  # fmt: skip
