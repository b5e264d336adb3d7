"""What lint says: findings as data, and what each code means."""

from __future__ import annotations

from dataclasses import dataclass

CODES = {
    "capability-ignored": "declared, and outputs are those of a layer without it",
    "capability-wrong": "declared, and outputs are neither those with it nor those without",
    "capability-refused": "declared, and a plain layer that asks for it is refused",
    "capability-not-refused": "not declared, and `reject` does not refuse it",
    "capability-undeclared": "honoured in every kind of batch, and not declared: nobody can use it",
    "argument-ignored": "an argument of the impl or of a call is accepted and has no effect",
    "option-unread": "an option that no code reads",
    "parameter-unread": "a parameter of a function of the backend's own that its body does not read",
    "attribute-unread": "an attribute that is set on `self` and read nowhere",
    "field-unread": "a field of the metadata that nobody reads",
    "metadata-stale": "a builder's metadata depends on the batch that it built before",
    "metadata-overwritten": "metadata changed when the next batch was built",
    "metadata-aliases-host": "metadata changed when the caller's host tensors were overwritten",
    "metadata-mutable": "metadata or a step that can be changed",
    "state-stale": "an eager step's outputs depend on the steps before",
    "graph-stale": "a replay's outputs depend on the replays before",
    "graph-moved": "a tensor that a captured graph reads is another one at the next step",
    "run-failed": "a step that the backend declares ended in an error",
}


@dataclass(frozen=True)
class Finding:
    """One thing that a backend accepts and does not use, or does not keep to."""

    code: str  # one of CODES
    where: str  # a capability and a kind of batch, a field, or file:line
    what: str
    hint: str  # what to do

    def __str__(self) -> str:
        return f"{self.code}: {self.where}: {self.what}. {self.hint}"
