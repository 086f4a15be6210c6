import pytest


@pytest.fixture(scope="module")
def llama(data, tmp_path_factory):
    """A checkpoint of a llama in bf16, by one rank."""
    from support.runs import trainer as runs  # needs pydantic

    folder = tmp_path_factory.mktemp("runs") / "llama"
    settings = runs.settings_of(
        data, model=runs.MODELS["llama"], checkpoint={"dir": str(folder)}, precision={"dtype": "bf16"}
    )
    runs.steps_of(0, settings, steps=1)
    return folder
