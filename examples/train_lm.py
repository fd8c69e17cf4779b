"""Trains a byte-level transformer with Muon, MuonClip and AdamW on real text.

    python examples/train_lm.py                           # compare all three
    python examples/train_lm.py --quick                   # the same in 60 steps
    python examples/train_lm.py --optimizer muonclip --data book.txt --steps 1000
    python examples/train_lm.py --resume                  # go on after an interruption

Every optimizer sees the same initial weights and the same batches. Results go to
`--out`: checkpoints, `comparison.png` and `results.json`.
"""

import sys

from memory import keep_freed_memory
from train_lm_options import OPTIMIZERS, parse_args


def main() -> None:
    args = parse_args(__doc__)
    keep_freed_memory()
    # Only now, since importing JAX takes seconds that `--help` need not wait for.
    from train_lm_loop import compare, describe, saved_steps

    chosen = [args.optimizer] if args.optimizer else OPTIMIZERS
    try:
        compare(args, chosen)
    except KeyboardInterrupt:
        steps = saved_steps(args, chosen)
        command = " ".join(word for word in sys.argv if word != "--resume")
        raise SystemExit(
            f"\nstopped. {describe(steps, args.steps)}. To go on from there: "
            f"python {command} --resume"
            if any(steps.values())
            else "\nstopped before the first checkpoint: nothing is saved"
        ) from None


if __name__ == "__main__":
    main()
