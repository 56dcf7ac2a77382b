"""docs/deploy/kuberay.yaml: what it says to Ray Serve and to us is taken. No cluster is needed."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray")

from ray.serve.schema import ServeDeploySchema

from forerun.ray.scale import read

KUBERAY = Path(__file__).parents[2] / "docs" / "deploy" / "kuberay.yaml"


def test_its_serve_config_is_valid_and_its_words_are_options():
    said = yaml.safe_load(KUBERAY.read_text(encoding="utf-8"))["spec"]
    parsed = ServeDeploySchema.model_validate(yaml.safe_load(said["serveConfigV2"]))
    (one,) = parsed.applications
    assert one.import_path == "forerun.ray.app:builder" and one.route_prefix == "/"
    config, settings, scale = read(one.args)
    assert config.model == "smollm2-135m" and (scale.replicas, scale.most) == (2, 4)
    assert "forerun-serve-svc" in settings.allowed_hosts
    (group,) = said["rayClusterConfig"]["workerGroupSpecs"]
    assert group["minReplicas"] >= scale.replicas and group["maxReplicas"] >= scale.most
