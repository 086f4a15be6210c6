"""Best-fit packing, masks of the loss, and mixtures of sources."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_ops.models.context import IGNORE_INDEX
from parallel_ops.train.build import build_samples
from parallel_ops.train.checkpoint.resume import _data_of
from parallel_ops.train.data.best_fit import Packing
from parallel_ops.train.data.mixture import Mixture
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.split import split
from parallel_ops.train.data.token_file import TokenFile
from parallel_ops.train.data.tokens import TokenStream
from support.ranks.distributed import ranks
from support.runs.trainer import VOCABULARY, settings_of, steps_of, trainer_of

LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=60).filter(lambda found: max(found) > 1)


def file_of(documents, folder, masked=()):
    """Tokens of the documents; those of ``masked`` do not count in the loss."""
    tokens = np.concatenate(documents)
    mask = np.array([token not in masked for token in tokens], np.uint8) if len(masked) else None
    return TokenFile(folder / "a.bin", tokens, np.cumsum([len(d) for d in documents]), mask)


def numbered(lengths, first=0):
    """Documents in which every token is another number."""
    ends = first + np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def one_after_the_other(sizes, capacity):
    """Best-fit decreasing as it is defined; the rooms that are left."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - size)
    return sorted(rooms)


class TestBestFit:
    @given(LENGTHS, st.integers(1, 15))
    def test_it_is_best_fit_decreasing(self, lengths, seq_length):
        packing = Packing(np.array(lengths), seq_length)
        own = [packing.size[packing.pieces(n)] for n in range(len(packing))]
        rooms = sorted(seq_length + 1 - int(sizes.sum()) for sizes in own)
        assert rooms == one_after_the_other(packing.size.tolist(), seq_length + 1)
        assert all(len(sizes) for sizes in own)

    @given(LENGTHS, st.integers(1, 15), st.booleans())
    def test_every_token_after_another_is_a_target_once(self, tmp_path_factory, lengths, seq_length, mask):
        stream = TokenStream.of([file_of(numbered(lengths, 1), tmp_path_factory.getbasetemp())])
        samples = Samples(stream, seq_length=seq_length, seed=1, document_mask=True, best_fit=True)
        batches = [samples.batch(range(n, n + 1)) for n in range(samples.in_epoch)]
        firsts = {int(d[0]) for d in numbered(lengths, 1) if len(d)}
        targets = np.concatenate([batch.targets[:, 0].numpy() for batch in batches])
        targets = targets[targets != IGNORE_INDEX]
        assert sorted(targets) == sorted(set(range(1, sum(lengths) + 1)) - firsts)
        for batch in batches:
            own = batch.targets != IGNORE_INDEX
            assert (batch.targets[own] == batch.tokens[own] + 1).all()

    def test_documents_are_whole_where_they_fit(self, tmp_path):
        lengths = np.random.default_rng(0).integers(2, 65, 500)
        stream = TokenStream.of([file_of(numbered(lengths), tmp_path)])
        samples = Samples(stream, seq_length=64, seed=0, best_fit=True)
        every = samples.samples(range(samples.in_epoch))
        padded = [q.counts is not None for q in every]  # and the padding is a document
        whole = sum(len(q.begins) for q in every) - sum(padded)
        assert whole == 500
        filled = samples.packing.size.sum() / (samples.in_epoch * 65)
        assert filled > 0.94
        epochs = [[q.tokens.tolist() for q in samples.samples(range(e * samples.in_epoch, (e + 1) * samples.in_epoch))]
                  for e in range(2)]  # fmt: skip
        assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]

    def test_it_is_fast_for_many_documents(self):
        lengths = np.random.default_rng(0).lognormal(6, 1.2, 1_000_000).astype(np.int64)
        packing = Packing(lengths, 4096)
        assert packing.size.sum() / (len(packing) * 4097) > 0.99

    def test_nothing_to_pack(self):
        with pytest.raises(ValueError, match="no document of two tokens or more"):
            Packing(np.array([1, 0, 1]), 4)


class TestMask:
    @settings(max_examples=60)
    @given(st.data())
    def test_masked_tokens_are_no_targets(self, tmp_path_factory, data):
        lengths = data.draw(LENGTHS.filter(lambda found: sum(found) > 8))
        masked = data.draw(st.sets(st.integers(1, sum(lengths)), min_size=1))
        file = file_of(numbered(lengths, 1), tmp_path_factory.getbasetemp(), masked)
        options = {
            "seq_length": data.draw(st.integers(1, 7)), "seed": 5, "document_mask": data.draw(st.booleans()),
            "best_fit": data.draw(st.booleans()),
        }  # fmt: skip
        stream = TokenStream.of([file])
        if data.draw(st.booleans()):
            stream = TokenStream.of([file for part in split(stream, 0.4) for file in part.files])
        own = Samples(stream, **options)
        everything = Samples(stream, **options, prompt_loss=True)
        assert own.ignores and everything.ignores == (options["document_mask"] or options["best_fit"])
        for number in range(own.in_epoch):
            a, b = (s.batch(range(number, number + 1)) for s in (own, everything))
            assert a.tokens.tolist() == b.tokens.tolist()
            want = b.targets.clone()
            for token in masked:
                want[want == token] = IGNORE_INDEX
            assert a.targets.tolist() == want.tolist()


def sources_of(folder, sizes=(40, 300)):
    """Streams of token files: of the first the tokens are below 1000, and so on."""
    paths = []
    for number, size in enumerate(sizes):
        (folder / str(number)).mkdir(exist_ok=True)
        paths.append(folder / str(number) / "tokens.npy")
        np.save(paths[-1], 1000 * number + np.arange(size))
    return paths


class TestMixture:
    @settings(max_examples=40)
    @given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=5), st.integers(0, 30_000))
    def test_shares_and_items(self, tmp_path_factory, weights, first):
        folder = tmp_path_factory.getbasetemp()
        paths = sources_of(folder, range(20, 20 + 7 * len(weights), 7))
        sources = [Samples(TokenStream([path]), seq_length=4, seed=3) for path in paths]
        mixture = Mixture(sources, weights)
        places = [mixture.place(number) for number in range(10_000)]
        counts = np.bincount([sources.index(source) for source, _ in places], minlength=len(weights))
        assert (np.abs(counts / 10_000 - np.array(weights) / sum(weights)) <= len(weights) / 10_000).all()
        for source, count in zip(sources, counts, strict=True):  # each sample of a source once, in order
            assert [own for of, own in places if of is source] == list(range(count))
        for number in (first, first + 10_000):
            source, own = mixture.place(number)
            (q,) = mixture.samples(range(number, number + 1))
            assert q.tokens.tolist() == source.samples(range(own, own + 1))[0].tokens.tolist()
        a, b = mixture.place(first), mixture.place(first + 10_000)
        assert a[0] is b[0] and b[1] - a[1] == counts[sources.index(a[0])]

    @pytest.mark.parametrize("weights", [[1e308, 1e308], [1.7e308, 1e-320], [5e-324, 5e-324], [1.0, 1e-9]])
    def test_weights_of_any_size(self, tmp_path, weights):
        sources = [Samples(TokenStream([path]), seq_length=4, seed=3) for path in sources_of(tmp_path)]
        mixture = Mixture(sources, weights)
        counts = np.bincount([sources.index(mixture.place(number)[0]) for number in range(10_000)])
        assert counts.tolist() == ([5000, 5000] if weights[0] == weights[1] else [9999, 1])
        # The description is of what is taken: of a small weight more than its share.
        for line, count, source in zip(mixture.details(20_000), counts, sources, strict=True):
            assert f"{count / 10_000:.2%}" in line and f" {2 * count / source.in_epoch:.3g} epochs" in line

    def test_a_batch_has_about_its_share(self, tmp_path):
        mixture = Mixture([Samples(TokenStream([p]), seq_length=4, seed=3) for p in sources_of(tmp_path)], [3, 1])
        for first in range(0, 1000, 16):
            batch = mixture.batch(range(first, first + 16))
            assert 3 <= int((batch.tokens[0] >= 1000).sum()) <= 5
        for number in range(4):
            token = int(mixture.samples(range(number, number + 1))[0].tokens[2])
            file, document = mixture.file_of(number, token)
            assert file is mixture.stream.files[token // 1000] and document == 0

    def test_as_settings(self, tmp_path):
        tables = [{"paths": [str(path)], "weight": weight} for path, weight in zip(
            sources_of(tmp_path), (0.75, 0.25), strict=True)]  # fmt: skip
        own = settings_of("x", data={"sources": tables, "eos_id": None})
        samples, _ = build_samples(own, None)
        assert samples.weights == [0.75, 0.25] and samples.in_epoch == 2 + 18
        assert samples.sources[0].seed == own.run.seed != samples.sources[1].seed
        evaluated = settings_of("x", data={"sources": tables}, evaluation={"share": 0.5})
        samples, held_out = build_samples(evaluated, None)
        assert (len(samples.stream), len(held_out.stream), held_out.stream.sizes) == (170, 170, [20, 150])
        sources_of(tmp_path, (4, 300))
        with pytest.raises(ValueError, match=r"data\.sources\.0: the data has 4 tokens"):
            build_samples(own, None)

    def test_a_mixture_of_other_weights_is_other_data(self, tmp_path):
        def data_of(weight):
            tables = [{"paths": [str(path)], "weight": w} for path, w in zip(
                sources_of(tmp_path, (90, 300)), (weight, 1.0), strict=True)]  # fmt: skip
            model = {"vocab_size": 2000, "seq_length": 16, "num_layers": 1, "hidden_size": 8, "num_heads": 1}
            return _data_of(trainer_of(settings_of("x", model=model, data={"sources": tables})))

        assert data_of(1.0) == data_of(1.0) != data_of(2.0)


def chat_data(folder):
    """Two files of conversations with prompts that do not count, as tokenize writes them."""
    from parallel_ops.tokenization import indexed

    draw = np.random.default_rng(0)
    paths = []
    for number in range(2):
        lengths = draw.integers(3, 30, 60)
        path = folder / f"{number}.bin"
        draw.integers(1, VOCABULARY, lengths.sum()).astype("uint16").tofile(path)
        with path.with_suffix(".idx").open("wb") as file:
            indexed.write(file, lengths, np.dtype("uint16"))
        draw.integers(0, 2, lengths.sum()).astype("uint8").tofile(path.with_suffix(".mask"))
        paths.append(path)
    return {
        "eos_id": None, "packing": "best_fit",
        "sources": [{"paths": [str(path)], "weight": weight} for path, weight in zip(paths, (0.8, 0.2), strict=True)],
    }  # fmt: skip


@pytest.mark.parametrize("document_mask", [False, True])
def test_ranks_that_share_masked_and_padded_samples_train_as_one(tmp_path, document_mask):
    data = {**chat_data(tmp_path), "document_mask": document_mask}
    alone = steps_of(0, settings_of("x", data=data))
    together = ranks(2).run(steps_of, settings_of("x", data=data, parallel={"dp": 2, "zero": 2}))
    np.testing.assert_allclose(together[0], alone, rtol=2e-5)


def test_a_resumed_run_takes_the_same_samples(tmp_path):
    data = chat_data(tmp_path)
    whole = steps_of(0, settings_of("x", data=data, checkpoint={"dir": str(tmp_path / "a")}))
    first = settings_of("x", data=data, checkpoint={"dir": str(tmp_path / "b")})
    steps_of(0, first, steps=2)
    assert steps_of(0, settings_of("x", data=data), tmp_path / "b") == whole[2:]
