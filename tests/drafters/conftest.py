import pytest

from tests.drafters.kinds import Kinds
from tests.parity.conftest import compiled, quickly  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def kinds(tmp_path_factory):
    return Kinds(tmp_path_factory.mktemp("kinds"))
