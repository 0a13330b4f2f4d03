"""draftsmith trains DFlash drafters for speculative decoding. The data path, and the file that holds each part:

conversations -> data/ (prepare: token shards) -> unit.py (unit(u), a packed row) -> target.py (taps of the frozen LLM)
-> step.py (drafters/, attention.py, loss.py: one training step) -> train.py (the loop; read it first)
-> checkpoint.py -> evaluate.py (decode.py, walk.py) -> export.py (layouts that servers load)
"""

__version__ = "0.1.0"
