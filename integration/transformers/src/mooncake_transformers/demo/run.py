"""The demo from beginning to end: cluster up, conversation, cluster down, the model run whole, the report."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mooncake_transformers.cluster import Cluster, ClusterSpec
from mooncake_transformers.cluster.console import ClusterView
from mooncake_transformers.cluster.prepare import prepare
from mooncake_transformers.cluster.signals import StopSignal
from mooncake_transformers.demo.client import Answer, ChatClient, model_name
from mooncake_transformers.demo.conversation import CONVERSATIONS, MAX_TOKENS, WARM_UP_MESSAGES, handbook
from mooncake_transformers.demo.reference import Reference, WholeModel, first_difference
from mooncake_transformers.demo.report import Asked, Report, make_report

__all__ = ["run_demo"]


def run_demo(
    spec: ClusterSpec, console: Console, stop: StopSignal, *, log_folder: Path | None = None
) -> Report:
    """Run it all and return what it found; progress goes to ``console``.

    Each process's log is kept in ``log_folder`` where one is given.
    Raises ClusterError, WorkerError, DemoError, OSError, and KeyboardInterrupt when ``stop`` is set. Nothing
    is left running then.
    """
    with stop.interrupting():
        source = prepare(spec)
    with ClusterView(console) as view:
        console.rule("[bold]1. Start store, workers and conductor", align="left")
        cluster = Cluster(spec, on_progress=view.show, stop=stop.event, log_folder=log_folder)
        cluster.start()
    try:
        with stop.interrupting():
            name = model_name(cluster.url)
            console.rule(f"[bold]2. Two visitors talk to {name}", align="left")
            asked = _converse(ChatClient(cluster.url, name), console)
    finally:
        # Before the reference: two workers and a third copy of the model need not fit into memory together.
        cluster.close()
    with stop.interrupting():
        console.rule("[bold]3. The same requests, the model whole in one process", align="left")
        references = _run_whole(source, spec, asked, console)
    return make_report(asked, references, model=name, dtype=spec.dtype, device=spec.device)


def _converse(client: ChatClient, console: Console) -> list[Asked]:
    system = handbook()
    total = sum(len(conversation.questions) for conversation in CONVERSATIONS)
    asked: list[Asked] = []
    warm_up = "warm-up: one short request that shares nothing with the others"
    with console.status(warm_up):
        client.ask(WARM_UP_MESSAGES, max_tokens=4)
    console.print(warm_up)
    for conversation in CONVERSATIONS:
        answers: list[str] = []
        for question in conversation.questions:
            messages = conversation.messages(system, answers)
            with console.status(f"{len(asked) + 1}/{total}  {conversation.visitor}: {question}"):
                answer = client.ask(messages, max_tokens=MAX_TOKENS)
            answers.append(answer.text)
            asked.append(
                Asked(visitor=conversation.visitor, question=question, messages=messages, answer=answer)
            )
            _print_exchange(asked, total, console)
    return asked


def _print_exchange(asked: list[Asked], total: int, console: Console) -> None:
    one = asked[-1]
    console.print(Text(f"{len(asked)}/{total}  {one.visitor}: {one.question}", style="bold"), soft_wrap=True)
    console.print(Text(f"     {' '.join(one.answer.text.split())}", style="dim"), soft_wrap=True)
    console.print(f"     {_in_short(one.answer)}", soft_wrap=True)


def _in_short(answer: Answer) -> str:
    share = f"{answer.prompt_tokens:,} prompt tokens, {answer.cached_tokens:,} cached"
    return f"{share}, first token after {answer.ttft_s:.3f} s, then one every {answer.tbt_s * 1000:.0f} ms"


def _run_whole(source: str, spec: ClusterSpec, asked: list[Asked], console: Console) -> list[Reference]:
    with console.status("loading the model"):
        whole = WholeModel(source, dtype=spec.dtype, device=spec.device, threads=spec.threads)
    references: list[Reference] = []
    for number, one in enumerate(asked, 1):
        began_s = time.monotonic()
        with console.status(f"{number}/{len(asked)}  {one.visitor}: {one.question}"):
            references.append(whole.answer(one.messages, max_tokens=MAX_TOKENS))
        verdict = first_difference(one.answer, references[-1]) or "every token equal"
        tokens = len(one.answer.token_ids)
        console.print(
            f"{number}/{len(asked)}  {tokens} tokens in {time.monotonic() - began_s:.1f} s, {verdict}"
        )
    return references
