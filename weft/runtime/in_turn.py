raise ImportError("weft.runtime.in_turn moved: import Turn from weft.runtime.unfused; a spec's turn is never None")
