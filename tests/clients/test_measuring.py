"""Load testers and evaluation harnesses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deltic
from tests.served import Served

TOKENIZER = Path(deltic.__file__).parent / "demo"


@pytest.mark.parametrize("kind", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(served: Served, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("guidellm")
    program = shutil.which("guidellm", path=str(Path(sys.executable).parent)) or "guidellm"
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={served.process.url},request_format={kind},api_key={served.process.api_key}"
    subprocess.run(
        [
            program, "run", "--backend", backend, "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=6", "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8", "--output", f"kind=json,path={report}",
            "--disable-console",
        ],
        check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    made = benchmark["metrics"]["request_totals"]
    assert (made["successful"], made["errored"]) == (6, 0)


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval(served: Served, tokenized: bool) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model=served.model, base_url=f"{served.process.url}/v1/completions", header={"Authorization": f"Bearer {served.process.api_key}"},
        tokenizer_backend="huggingface", tokenizer=str(TOKENIZER), tokenized_requests=tokenized, max_length=1024, max_retries=1,
    )  # fmt: skip

    def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]

    question = "Once upon a time there was a"
    answers = model.loglikelihood(
        instances("loglikelihood", (question, " fox"), (question, " xylophone")), disable_tqdm=True
    )
    assert len(answers) == 2 and all(value < 0 for value, _ in answers) and answers[0][0] > answers[1][0]
    (rolled,) = model.loglikelihood_rolling(
        instances("loglikelihood_rolling", ("A fox lived in a forest.",)), disable_tqdm=True
    )
    assert rolled < 0
    until = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    (text,) = model.generate_until(instances("generate_until", (question, until)), disable_tqdm=True)
    assert text and "\n" not in text
