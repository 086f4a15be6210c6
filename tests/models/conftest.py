"""What the tests of Hugging Face folders share."""

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    import transformers

    from support.integrations.huggingface_folders import Folders

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def tokens():
    import torch

    from support.integrations.huggingface import LENGTH, VOCAB

    return torch.randint(VOCAB, (LENGTH, 2), generator=torch.Generator().manual_seed(1))
