"""``python -m softmax_rnn``: the command line."""

from softmax_rnn.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
