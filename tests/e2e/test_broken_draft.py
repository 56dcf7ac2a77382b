"""A server that may go on without a draft that it cannot use says so wherever one would look."""

import sys

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
from tests.worlds.servers import started

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
    line = ["--model", str(model), "--speculative-draft-model-path", str(draft)]
    line += ["--kv-tokens", "512", "--max-sequences", "2"]
    config = EngineConfig(
        model=str(model),
        speculative_draft_model_path=str(draft),
        draft_on_error="stop",
        kv_tokens=512,
        max_sequences=2,
    )
    with pytest.raises(ModelError, match=r"fc\.weight holds NaN"):
        open_target(config)
    log = tmp_path / "log"
    with started([sys.executable, "-m", "forerun.cli", "serve", *line], log) as server:
        fault = server.http.get("/health").json()["speculation_fault"]
        info = server.http.get("/server_info").json()
        page = server.http.get("/metrics").text
        answer = server.complete(max_tokens=4, ignore_eos=True).json()
    assert fault.startswith(REASON) and "fc.weight holds NaN" in fault
    assert info["drafter"]["fault"] == fault
    assert info["config"]["speculative_algorithm"] == "OFF"
    (line,) = [x for x in page.splitlines() if x.startswith("forerun:speculation_fault{")]
    assert "fc.weight holds NaN" in line and line.endswith(" 1.0")
    assert fault in log.read_text()
    assert answer["usage"]["completion_tokens"] == 4
