"""Write the changelog of docs/contract.md anew, from the releases that refusals are worded with.

python -m benchmarks docs contract
"""

from __future__ import annotations

from pathlib import Path

from attn_backends.interface.contract import RELEASES, dotted

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
HEADING = "## Changelog\n\n"  # the page's last: what stands behind it is made here


def page(text: str) -> str:
    """The page with the changelog as it should be."""
    return text.partition(HEADING)[0] + HEADING + changelog()


def changelog() -> str:
    """The releases in Markdown, newest first."""
    parts = []
    for release in RELEASES:
        kinds = ("added", "deprecated", "removed")
        lines = [f"- {kind.capitalize()}: {sentence}" for kind in kinds for sentence in getattr(release, kind)]
        parts.append("\n".join([f"### {dotted(release.version)} ({release.date})", "", *lines]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"written to {PAGE}")
