"""`python -m amx_sft_moe profile`: runs the experiment and prints the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from amx_sft_moe.errors import ArgumentError, KernelError
from amx_sft_moe.system.machine import available_memory

from .memory import experts_that_fit, planned_bytes, with_experts
from .options import Options, parse


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # at once: someone is watching


def _fitted(options: Options, memory: int) -> Options:
    """The options with as many experts as fit. Raises ArgumentError where that is too few for a token."""
    least = options.shape.top_k
    fit = experts_that_fit(options, memory)
    if fit < least:
        needed = planned_bytes(with_experts(options, least))
        raise ArgumentError(
            f"--memory: expected room for at least {least} experts, got {memory / 1e9:.1f} GB, room for {fit}: "
            f"with --tokens {options.tokens} and --check-tokens {options.check_tokens} they take "
            f"{needed / 1e9:,.1f} GB"
        )
    return with_experts(options, fit)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the check failed or the user can mend it (standard error says what), 2 wrong
    options, 130 Ctrl-C."""
    wanted = parse(list(sys.argv[1:] if argv is None else argv))
    try:
        import torch
    except ImportError:
        sys.stderr.write(
            "error: profile needs torch: install the package with its extra [train] "
            "(pip install '.[train]' in a clone)\n"
        )
        return 1
    torch.set_num_threads(wanted.threads)
    try:
        return _run(wanted)
    except (ArgumentError, KernelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130


def _run(wanted: Options) -> int:
    from amx_sft_moe import _core

    from . import report
    from .experiment import Results, check, measure, passed
    from .layer import Layer

    memory = wanted.memory if wanted.memory is not None else available_memory() * 3 // 4
    options = _fitted(wanted, memory)
    # Before the layer takes the memory.
    machine = None
    if options.machine:
        machine = _core.measure_machine(options.threads, min(1 << 30, memory // 4))
    layer = Layer(options)
    op = layer.operator()
    _line(report.heading(options, wanted.shape, memory, op.kernel))
    _line(report.machine(machine, options.threads))
    errors = check(op, layer, layer.batch(options.check_tokens))
    ok = passed(errors, options)
    _line(report.check(errors, options, ok))
    if not ok:
        return 1
    timings = measure(op, layer, layer.batch(options.tokens))
    _line("\n" + report.text(Results(op.kernel, errors, *timings, machine), options))
    return 0
