raise ImportError(
    "weft.runtime.in_turn no longer exists: import Turn from weft.runtime.unfused. The turn that a spec gets is never None"
)
