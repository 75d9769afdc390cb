"""The one error of model loading."""

from __future__ import annotations


class ModelError(Exception):
    """The model's files cannot be served: the operator's to mend. Names the field, tensor or file at fault."""
