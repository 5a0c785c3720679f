"""`mocker calibrate`: logs of an engine -> a timing profile, its error, and what the logs cannot say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .flags import at_least, number_in
from .terminal import EXIT_OK, guarded, print_text

__all__ = ["calibrate_main"]


def calibrate_main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run ``mocker calibrate``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog or "mocker calibrate",
        description="Fit a timing model to logs: a row a step, a row a request (TTFT and ITL), or dumps of vLLM's or "
        "SGLang's metrics page.",
        epilog="Use the profile with: mocker replay FILE --engine planner_profile_data=profile.json",
    )
    parser.add_argument("logs", nargs="+", metavar="FILE", help="JSON lines, CSV, Parquet, or dumps as .prom or .txt")
    parser.add_argument("-o", "--output", default="profile.json", metavar="FILE", help="profile (default: %(default)s)")
    parser.add_argument("--kind", choices=("auto", "steps", "requests", "metrics"), default="auto",
                        help="what a row is (default: %(default)s)")
    parser.add_argument("--map", action="append", default=[], metavar="NAME=FIELD",
                        help="another field of a step log for ms, prefills, tokens, prefix, decodes, context or pool")
    parser.add_argument("--max-num-batched-tokens", type=at_least(1), default=8192, metavar="N",
                        help="tokens of a pass, for request logs (default: %(default)s)")
    parser.add_argument("--hold-out", type=number_in(0.01, 0.9), default=0.2, metavar="X",
                        help="share of the rows kept for the error (default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the choice of those rows")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(list(sys.argv[1:] if argv is None else argv))

    def body() -> int:
        from mocker.calibrate import fit, read_log
        from mocker.calibrate_logs import STEP_FIELDS

        names = {}
        for pair in args.map:
            name, equals, field = pair.partition("=")
            if not equals or name not in STEP_FIELDS or not field:
                parser.error(f"--map {pair}: expected NAME=FIELD with NAME one of {', '.join(STEP_FIELDS)}")
            names[name] = field
        steps = read_log(args.logs, args.kind, names, args.max_num_batched_tokens)
        found = fit(steps, args.seed, args.hold_out)
        for part, values, terms in (("prefill ms", found.model.prefill, found.model.PREFILL_TERMS),
                                    ("decode ms", found.model.decode, found.model.DECODE_TERMS)):
            words = [f"{value:.6g}" if term == "constant" else f"{value:.6g} {term}"
                     for term, value in zip(terms, values, strict=True) if value]
            print_text(f"{part} = {' + '.join(words) or '0'}")
        for kind, error in found.errors.items():
            print_text(f"error on {error['rows']:,.0f} held-out rows ({kind}): median {100 * error['median']:.1f} %, "
                       f"90 % of them below {100 * error['p90']:.1f} %, bias {100 * error['bias']:+.1f} %")
        for doubt in found.doubts:
            print_text(f"not identified: {doubt}")
        found.model.save(args.output)
        print_text(f"Saved the profile to: {args.output}")
        return EXIT_OK

    return guarded(parser.prog, body, debug=args.debug)
