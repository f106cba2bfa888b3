"""The paper's tables: list the commands that fill them, collect the results, show a table.

    python -m scripts.reproduce list --table 5 --seeds 0 1 2 | xargs -P 2 -I{} sh -c '{}'
    python -m scripts.reproduce list --seeds 0 1 2 3 4 --missing     what results/ lacks
    python -m scripts.reproduce collect runs      results/*.jsonl, the tables of README.md and docs/
    python -m scripts.reproduce show --table 4 "leads 1"             also those on no page

The commands carry --resume, so a finished run returns at once and an interrupted one continues.
`collect` without a folder writes the tables from results/ alone.
"""
from scripts import collect, study
from scripts.tables import SCALES, TABLES
from support import config, exit_cleanly


def main(argv=None):
    p = config.Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = p.add_argument
    add("action", choices=("list", "collect", "show"))
    add("runs", nargs="?", help="of collect: a folder with run folders anywhere below it")
    add("--table", nargs="+", choices=study.WRITTEN, default=TABLES, metavar="N",
        help=f"{', '.join(TABLES)} (default: all); show: also `leads N`, `gains N`, `labels N`")
    add("--scale", choices=SCALES, default="mini", help="(default: mini)")
    add("--seeds", nargs="+", type=int, default=[0], help="(default: 0)")
    add("--method", nargs="+", help="only these methods (default: all)")
    add("--missing", action="store_true", help="only runs that results/ lacks")
    args = p.parse_args(argv)
    if args.action == "collect":
        if args.runs:
            collect.collect(args.runs)
        return collect.write_pages(study.WRITTEN)
    if args.action == "show":
        return print("\n\n".join(study.WRITTEN[name]() for name in args.table))
    found = {}                                           # cells may share a run
    for cell in (cell for number in args.table for cell in TABLES.get(number, ())):
        if cell.runs_at(args.scale) and (not args.method or cell.method in args.method):
            runs = collect.runs_of(cell, args.scale)
            found |= {cell.command(args.scale, seed): None for seed in args.seeds
                      if not (args.missing and seed in runs)}
    for command in found:
        print(f"{command} --resume --out {collect.configuration(command)['out']}")


if __name__ == "__main__":
    exit_cleanly(main)
