raise ImportError(
    "weft.runtime.in_turn no longer exists: import Turn from weft.runtime.unfused. The methods of an operator's spec always "
    "get a Turn, never None"
)
