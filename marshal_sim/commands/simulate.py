"""`marshal simulate`: the shipped code in simulated clusters with faults: seeds, a kept schedule, or on from a dump.

Needs no Kafka. What judges the judges is `python -m marshal_sim`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_py.cli import output
from marshal_py.cli.documents import prints
from marshal_py.cli.options import Json, command
from marshal_py.protocol.fold.policies import KNOWN
from marshal_py.spark import require_spark
from marshal_sim.cluster.scenario import Options
from marshal_sim.commands import audit, one_run, seeds
from marshal_sim.tools import sweep
from marshal_sim.tools.dump_audit import Audit
from marshal_sim.tools.sweep import Counted

EXAMPLE: Final = output.example("marshal simulate --seeds 0:4 --json")

Scenario = Annotated[
    Path | None,
    typer.Option("--scenario", exists=True, dir_okay=False, metavar="FILE", help="Run the schedule in this file."),
]
Queries = Annotated[
    int,
    typer.Option(
        "--queries", min=0, metavar="N", help="Make N of the consumers streaming queries of Spark. Not --scenario."
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="Every group has this policy. Not --scenario.",
        show_default="balanced or greedy, as the seed says",
    ),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Of the Spark cluster; sc://HOST:PORT is Spark Connect.",
        show_default="local, every core",
    ),
]


Wanted = Annotated[
    str | None, typer.Option("--seeds", metavar="A:B", show_default=seeds.SEEDS, help="Seed range, B exclusive.")
]
Dump = Annotated[
    Path | None,
    typer.Option(
        "--dump",
        metavar="FILE",
        help="Judge a cluster's log (`marshal log dump`); with --seeds or --seed, go on from its final state.",
    ),
]
FromGroup = Annotated[
    str | None, typer.Option("--group", metavar="GROUP", help="Of a dump: go on with this group alone.")
]
Witnesses = Annotated[
    bool,
    typer.Option("--witnesses", help="Clients die with a witness that publishes their last wills. Not --scenario."),
]
Answers = Annotated[
    bool, typer.Option("--answers", help="Handlers give messages back and end them; dead letters. Not --scenario.")
]
Aio = Annotated[
    bool, typer.Option("--aio", help="Most consumers are AsyncConsumers, with cancelled tasks. Not --scenario.")
]
Behind = Annotated[
    bool, typer.Option("--behind", help="Greedy consumers release what they fall behind on (D16). Not --scenario.")
]


@command
@prints(sweep.Total, one_run.RunResult, one_run.ScheduleResult, sweep.TraceEvent, Audit)
def simulate(
    wanted: Wanted = None,
    seed: seeds.Seed = None,
    scenario: Scenario = None,
    dump: Dump = None,
    group: FromGroup = None,
    trace: one_run.Trace = False,
    shrink: one_run.Shrink = None,
    html: one_run.Html = None,
    queries: Queries = 0,
    policy: Policy = "",
    witnesses: Witnesses = False,
    answers: Answers = False,
    behind: Behind = False,
    calls: Annotated[
        bool, typer.Option("--calls", help="Users flush, seek, pause and drain at any step, too. Not --scenario.")
    ] = False,
    lanes: Annotated[
        bool, typer.Option("--lanes", help="Half of the consumers handle messages by `process`. Not --scenario.")
    ] = False,
    aio: Aio = False,
    turns: Annotated[
        bool, typer.Option("--turns", help="--calls that are cancelled at any wait, and stop at locks. Not --scenario.")
    ] = False,
    processes: seeds.Processes = None,
    spark: Annotated[bool, typer.Option("--spark", help="Run --seeds on Spark instead of in processes here.")] = False,
    master: Master = None,
    as_json: Json = False,
) -> None:
    """Run the protocol in simulated clusters with faults, and judge each run by the promises.

    Exit code 1: a promise was violated, or the search was void, because nobody took over from anybody or nothing was
    delivered. The same seed gives the same run everywhere.

    A log of --dump is folded by two folds, compared after every record, and judged by the same promises. From its final
    state simulated consumers evict its dead sessions and take over. If a promise is broken in it, nothing is run.
    """
    if sum(given is not None for given in (wanted, seed, scenario)) > 1:
        raise typer.BadParameter("one of --seeds, --seed, --scenario")
    if trace and seed is None:
        raise typer.BadParameter("--trace needs --seed")
    if (shrink is not None or html is not None) and seed is None and scenario is None:
        raise typer.BadParameter("--shrink and --html need --seed or --scenario")
    if group is not None and (dump is None or (wanted is None and seed is None)):
        raise typer.BadParameter("--group says with whom runs go on: give --dump, and --seeds or --seed")
    options = Options(queries=queries, policy=policy, witnesses=int(witnesses), behind=int(behind))
    options = options._replace(answers=int(answers), calls=int(calls), lanes=int(lanes), turns=int(turns), aio=int(aio))
    fixed = options != Options()
    _check_fixed(policy, fixed and (scenario is not None or spark))
    if dump is not None and (fixed or spark or scenario is not None):
        raise typer.BadParameter("--dump says what there is: no other option than a seed changes a run from there")
    if (spark or master is not None) and (not spark or seed is not None or processes):
        raise typer.BadParameter("--spark goes with --seeds, and --master with --spark")
    if dump is not None:
        audit.judge(dump, as_json)
        asked = one_run.Asked(trace, shrink, html)
        audit.go_on(dump, group or "", wanted, seed, asked, processes, as_json)
    elif scenario is not None or shrink is not None or html is not None or (fixed and seed is not None):
        one_run.show(scenario, seed, None, one_run.Asked(trace and fixed, shrink, html), as_json, options)
    elif seed is not None:
        one_run.show_seed(seed, trace, as_json)
    else:
        chosen = seeds.seed_range(wanted or seeds.SEEDS)
        results = (
            _on_spark(chosen, master)
            if spark
            else sweep.sweep(chosen, processes or sweep.cores(), options if fixed else None)
        )
        seeds.print_many(results, len(chosen), as_json, seeds.words_of(options))


def _check_fixed(policy: str, elsewhere: bool) -> None:
    """Checks what the caller fixed of each run. `elsewhere`: he fixed something where a run does not take it."""
    if elsewhere:
        names = ", ".join(f"--{name}" for name in ("queries", "policy", *seeds.FLAGS))
        raise typer.BadParameter(f"{names} go with --seeds or --seed")
    if policy and policy not in KNOWN:
        raise typer.BadParameter(f"--policy {policy!r}: one of {', '.join(KNOWN)}")


def _on_spark(chosen: range, master: str | None) -> Iterable[Counted]:
    """Runs the seeds on Spark and returns the result of each, as `sweep` would. The Spark session ends afterwards."""
    require_spark()
    from marshal_py.spark.stream.session import local_session
    from marshal_sim.tools import spark_sweeps as sweeps

    session = local_session(master or "local[*]", name="marshal simulate")
    try:
        return sweeps.runs(sweeps.sweep(session, chosen))
    finally:
        session.stop()
