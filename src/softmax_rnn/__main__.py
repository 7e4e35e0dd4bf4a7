"""``python -m softmax_rnn``: the command line."""

from softmax_rnn.cli.main import process

if __name__ == "__main__":
    process()
