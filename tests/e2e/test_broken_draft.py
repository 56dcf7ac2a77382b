"""A server told to go on without a draft that it cannot use says so wherever one would look."""

import json
import subprocess
import sys
import time

import httpx
import pytest
from safetensors.torch import load_file, save_file

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.eagle_config import head_for
from forerun.errors import ModelError
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.options.config import EngineConfig
from forerun.train.export import export_head
from tests.models import tiny

REASON = "speculation is off: "


def test_disabled_speculation_is_in_log_health_and_metrics(tmp_path):
    hf = tiny.model("llama", num_hidden_layers=6)
    model = tiny.save_folder(hf, tmp_path / "target")
    arch = FolderCheckpoint(model).architecture
    draft = tmp_path / "draft"
    export_head(EagleHead(head_for(arch, arch.vocab)), None, draft)
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"][3, 5] = float("nan")
    save_file(tensors, draft / "model.safetensors")
    line = [sys.executable, "-m", "forerun.cli", "serve", "--model", str(model), "--port", "0"]
    line += [
        "--speculative-draft-model-path",
        str(draft),
        "--kv-tokens",
        "512",
        "--max-sequences",
        "2",
        "--json",
    ]
    with pytest.raises(ModelError, match=r"fc\.weight holds NaN"):
        open_target(
            EngineConfig(
                model=str(model),
                speculative_draft_model_path=str(draft),
                draft_on_error="stop",
                kv_tokens=512,
                max_sequences=2,
            )
        )
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            url = json.loads("".join(process.stdout.readline() for _ in range(3)))["url"]
            transport = httpx.HTTPTransport(retries=3)
            base = url.removesuffix("/v1")
            with httpx.Client(transport=transport, base_url=base, timeout=60) as client:
                while client.get("/v1/models").status_code == 503:
                    time.sleep(0.05)
                fault = client.get("/health").json()["speculation_fault"]
                info = client.get("/server_info").json()
                page = client.get("/metrics").text
                body = {"prompt": "the quick", "max_tokens": 4, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body).json()
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert fault.startswith(REASON) and "fc.weight holds NaN" in fault
    assert info["drafter"]["fault"] == fault
    assert info["config"]["speculative_algorithm"] == "OFF"
    (line,) = [x for x in page.splitlines() if x.startswith("forerun:speculation_fault{")]
    assert "fc.weight holds NaN" in line and line.endswith(" 1.0")
    assert fault in log.read_text()
    assert answer["usage"]["completion_tokens"] == 4
