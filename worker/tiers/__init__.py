"""Where snapshots go besides the device: host memory and disk, each with a byte budget.

A boundary is held in parts: the keys and values of the tokens since the boundary before it, so that what conversations
share is held once, and where models recur the state at it. A boundary can be restored from where every part on the way
to it is, in whichever tier.
"""
