"""Equations of the compared methods, as pure functions on tensors."""
