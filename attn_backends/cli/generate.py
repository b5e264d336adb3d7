"""`attn-backends generate`: prompts from options, a file or stdin; text as it is made; figures at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from attn_backends.cli.errors import EXIT_INTERRUPTED, Screen
from attn_backends.cli.tables import bar
from attn_backends.engine.config import EngineConfig

if TYPE_CHECKING:
    from attn_backends.engine.llm import LLM
    from attn_backends.engine.outputs import Prompt, Report, RequestOutput, TextChunk

DEFAULT_PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "List three uses of a paperclip.",
)


def read_prompts(prompts: Sequence[str], prompts_file: Path | None) -> list[str]:
    """The prompts to answer: options, else the file's lines, else stdin's if it is piped, else four of our own.

    Raises:
        ValueError: the file or stdin cannot be read, or the file holds nothing.
    """
    if prompts:
        return [_as_utf8(prompt) for prompt in prompts]
    if prompts_file is not None:
        try:
            lines = [line for line in prompts_file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts-file {prompts_file}: {error}") from error
        if not lines:
            raise ValueError(f"--prompts-file {prompts_file} holds no prompt: write one a line")
        return lines
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            piped = sys.stdin.buffer.read().decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8: {error}. Convert it: iconv -t UTF-8") from error
        if piped:
            return [piped]
    return list(DEFAULT_PROMPTS)


def _as_utf8(argument: str) -> str:
    """An argument whose bytes another locale, such as an ASCII one, has decoded; as it is if they are no UTF-8."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


@contextmanager
def loading_bar(console: Console) -> Iterator[Report]:
    """A bar that moves while things load, and says which."""
    with bar(console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def report(message: str, done: int = 0, total: int | None = None) -> None:
            progress.update(task, description=message, completed=done, total=total)

        yield report


class Session:
    """The texts of one run as they grow, and how they are shown."""

    def __init__(self, prompts: list[str], out: Console) -> None:
        self.prompts = prompts
        self.out = out
        self.texts = [""] * len(prompts)
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)

    def take(self, chunk: TextChunk) -> None:
        self.texts[chunk.index] += chunk.text
        self.outputs[chunk.index] = chunk.output or self.outputs[chunk.index]

    def panel(self, index: int) -> Panel:
        output = self.outputs[index]
        if output is not None and output.error is not None:
            body, ending = Text(f"{output.text}\n" if output.text else "").append(output.error, style="red"), "error"
        else:
            body, ending = Text(self.texts[index]), "…" if output is None else output.finish_reason
        return Panel(body, title=Text(self.prompts[index], overflow="ellipsis", no_wrap=True), title_align="left",
                     subtitle=ending, subtitle_align="right")  # fmt: skip

    def panels(self) -> RenderableType:
        return Group(*(self.panel(index) for index in range(len(self.prompts))))

    def live(self, chunks: Iterator[TextChunk]) -> None:
        """All texts growing at once, on a terminal."""
        with Live(self.panels(), console=self.out, refresh_per_second=10, vertical_overflow="visible") as live:
            for chunk in chunks:
                self.take(chunk)
                live.update(self.panels())

    def plain(self, chunks: Iterator[TextChunk]) -> None:
        """One text growing in place, or each of several when it is done: for pipes and files."""
        alone = len(self.prompts) == 1
        for chunk in chunks:
            self.take(chunk)
            if alone:
                print(chunk.text, end="", flush=True)
            elif chunk.output is not None:
                self.out.print(self.panel(chunk.index))
        if alone:
            print()

    def silent(self, chunks: Iterator[TextChunk], console: Console) -> None:
        """A bar of finished prompts only."""
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("generating", total=len(self.prompts))
            for chunk in chunks:
                self.take(chunk)
                progress.advance(task, 1 if chunk.output else 0)


def stats_table(llm: LLM) -> Table:
    """The figures of the last run."""
    stats = llm.stats
    table = Table(show_header=False, title="run")
    taken, expanded = llm.kv_bytes_per_token, llm.expanded_kv_bytes_per_token
    latent = f" in latent rows; expanded keys and values would take {expanded:,}" if taken != expanded else ""
    replayed = f", {stats.num_graph_steps} of them from graphs" if stats.num_graph_steps else ""
    for name, value in {
        "backend": f"{llm.selection.name} ({llm.selection.reason})",
        "prompts": f"{stats.num_prompts} ({stats.num_prompt_tokens} tokens)",
        "new tokens": f"{stats.num_new_tokens} in {stats.seconds:.2f} s, {stats.num_steps} steps{replayed}",
        "tokens/s": f"{stats.tokens_per_second:.1f}",
        "KV cache a token": f"{taken:,} bytes{latent}",
        "KV pages at peak": f"{stats.peak_pages} of {stats.num_pages}",
        "prefix-cache hits": f"{stats.num_prefix_hit_tokens} tokens",
        "preemptions": str(stats.num_preemptions),
    }.items():
        table.add_row(name, value)
    return table


def answer(config: EngineConfig, prompts: list[str], *, chat: bool | None, stream: bool, as_json: bool) -> int:
    """Load, generate, show. Returns the exit code: 0, 1 if a prompt failed, 130 after Ctrl-C.

    Args:
        chat: wrap prompts in the model's chat template; None: if it has one.
    """
    out, err = Screen(), Screen(stderr=True)
    if not out.encoding.startswith("utf"):
        err.print(
            f"standard output is {out.encoding}: what it cannot show comes as \\xe9 or \\u20ac; PYTHONUTF8=1 shows it",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    with loading_bar(err) as report:
        report("importing torch and transformers")
        from attn_backends.engine.llm import LLM

        llm = LLM.from_pretrained(config=config, report=report)
        inputs: list[Prompt] = [llm.render_prompt(prompt, chat) for prompt in prompts]
    session = Session(prompts, out)
    chunks = llm.stream(inputs)
    interrupted = False
    try:
        if as_json or not stream:
            session.silent(chunks, err)
        elif out.is_terminal and len(prompts) > 1:
            session.live(chunks)
        else:
            session.plain(chunks)
    except KeyboardInterrupt:
        interrupted = True
        chunks.close()  # type: ignore[attr-defined]  # a generator: closing it aborts what still runs
    _show_end(session, llm, out, err, stream=stream, as_json=as_json, interrupted=interrupted)
    failed = any(output is not None and output.error for output in session.outputs)
    return EXIT_INTERRUPTED if interrupted else int(failed)


def _show_end(
    session: Session, llm: LLM, out: Console, err: Console, *, stream: bool, as_json: bool, interrupted: bool
) -> None:
    if as_json:
        results = [
            asdict(output) if output else {"index": index, "text": text, "finish_reason": "abort"}
            for index, (output, text) in enumerate(zip(session.outputs, session.texts, strict=True))
        ]
        selection = {"backend": llm.selection.name, "reason": llm.selection.reason}
        print(json.dumps({"results": results, "selection": selection, "stats": asdict(llm.stats)}))
        return
    unfinished = [index for index, output in enumerate(session.outputs) if output is None]
    if not stream:
        out.print(session.panels())
    elif interrupted and not out.is_terminal and len(session.prompts) > 1:
        for index in unfinished:
            out.print(session.panel(index))
    for output in session.outputs:
        if output is not None and output.error is not None and len(session.prompts) == 1:
            err.print(Text(output.error, style="red"))
    if interrupted:
        err.print(f"\ninterrupted: {len(unfinished)} of {len(session.prompts)} prompts unfinished, texts are partial")
    err.print(stats_table(llm))
