"""The planner: candidates, their predicted costs, the choice and its reason. Needs no torch.

    weft.plan.choose(problem, model)                                    the choice, cached
    with weft.plan.use("shard[chunks=2,send=in_turn,by=dma]"): ...           pinned
    with weft.plan.use("autotune"): ...                                 measured at the first call of a shape, cached
    with weft.plan.use("heuristic"): ...                                the pick of FiCCO's static heuristic
    print(weft.plan.explain("all_gather_matmul", M=16384, N=8192, K=4096, ranks=2))

A choice is a function of shape, model, registered builders and, if given, measured times.
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
