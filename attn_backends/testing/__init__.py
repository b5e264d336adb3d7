"""Shipped test tools: the float64 reference, the cases and the conformance kit that every backend passes."""
