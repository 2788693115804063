"""Modules for :mod:`benchmarks.strangers`: models of transformers from small configurations, and small ones by hand.

None of them was written for this package. Every batch is a pure function of the seed, every dropout is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.demos import Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

NUM_SAMPLES = 24
VOCABULARY = 32
LENGTH = 8
WIDTH = 16
_SEED = 11


@dataclass(frozen=True)
class Stranger:
    """A module that is to be trained.

    Attributes:
        name: of the row.
        make: builds the LightningModule.
        data: tensors of all samples, along their first dimension, as a batch has them.
        split_points: three points at which pipelines may cut the module, for a second attempt where the first is
            refused; two stages take the middle one.
        random: every step draws random numbers, so that no two runs are equal.
        known_difference: why the module does not train as on one device, as the documentation says.
    """

    name: str
    make: Callable[[], L.LightningModule]
    data: Callable[[], Any]
    split_points: tuple[str, ...] = ()
    random: bool = False
    known_difference: str = ""


class _Module(L.LightningModule):
    """Plain SGD; the subclass has the training step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


# Models of transformers


class _OfTransformers(_Module):
    """A model of transformers, which computes its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class _Contrastive(_OfTransformers):
    """Tells which text of the batch belongs to which image."""

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, return_loss=True).loss
        return loss


_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_IMAGES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3}


def _of_transformers(config: str, model: str, *left_out: str, **settings: Any) -> Callable[[], L.LightningModule]:
    """Builds a model from its configuration; ``left_out`` are usual sizes that the configuration does not know."""

    def make() -> L.LightningModule:
        sizes = {name: value for name, value in _SIZES.items() if name not in left_out}
        made = getattr(transformers, config)(**{**sizes, **settings})
        _without_chance(made)
        return _OfTransformers(getattr(transformers, model)(made))

    return make


def _without_chance(config: Any) -> None:
    """Sets every dropout of a configuration, and of those within it, to 0."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _without_chance(value)
        elif isinstance(value, float) and ("drop" in name or name in ("apply_spec_augment", "mask_time_prob")):
            setattr(config, name, 0.0)


def _tokens(seed: int = _SEED, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (NUM_SAMPLES, length), generator=torch.Generator().manual_seed(seed))


def _normal(*shape: int, seed: int = _SEED) -> Tensor:
    """Standard normal values in float64, shape (samples, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64)


def _classes(count: int, *shape: int) -> Tensor:
    return torch.randint(count, (NUM_SAMPLES, *shape), generator=torch.Generator().manual_seed(_SEED + 1))


def _text() -> dict[str, Tensor]:
    """A text of which each token is to be told; also for masked language models."""
    return {"input_ids": _tokens(), "labels": _tokens()}


def _text_and_classes() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "labels": _classes(2)}


def _two_texts() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "labels": _tokens(_SEED + 1)}


def _images_and_classes() -> dict[str, Tensor]:
    return {"pixel_values": _normal(3, 16, 16), "labels": _classes(2)}


_SEQUENCES: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def _clip() -> L.LightningModule:
    tower = {k: v for k, v in _SIZES.items() if k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    text = {**_SIZES, **tower}
    config = transformers.CLIPConfig(text_config=text, vision_config={**tower, **_IMAGES, "intermediate_size": 32})
    config.projection_dim = WIDTH
    return _Contrastive(transformers.CLIPModel(config))


def _text_and_images() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "pixel_values": _normal(3, 16, 16)}


# Modules by hand


class _LightningTransformer(_Module):
    """Lightning's own demonstration: an encoder and decoder in one nn.Transformer, which predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=VOCABULARY, ninp=WIDTH, nhead=2, nhid=32, nlayers=2, dropout=0.0)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self.model(inputs, target), target.reshape(-1))


class _Autoencoder(_Module):
    """Lightning's first example: two chains, an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch)), batch)


class _VAE(_Autoencoder):
    """Draws its code in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(3, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mean = self.encoder(batch)
        log_variance = self.spread(mean)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return F.mse_loss(self.decoder(code), batch) + 0.1 * divergence


class _Mixer(_Module):
    """An MLP-Mixer: blocks that mix over positions and over channels."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
            self.positions = nn.Sequential(nn.Linear(LENGTH, 12), nn.GELU(), nn.Linear(12, LENGTH))
            self.channels = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.positions(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            mixed: Tensor = x + self.channels(self.norms[1](x))
            return mixed

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.blocks(x).mean(1)), y)


class _WaveNet(_Module):
    """Dilated causal convolutions; the loss is computed from the sum of what every layer skips ahead."""

    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.dilation = dilation
            self.gated = nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=dilation)
            self.skip = nn.Conv1d(WIDTH, WIDTH, 1)

        def forward(self, carried: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, skipped = carried
            value, gate = self.gated(F.pad(x, (self.dilation, 0))).chunk(2, 1)
            found = value.tanh() * gate.sigmoid()
            return x + found, skipped + self.skip(found)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(2**i) for i in range(4)])
        self.head = nn.Conv1d(WIDTH, 1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.transpose(1, 2)
        carried = x, torch.zeros_like(x)
        for layer in self.layers:
            carried = layer(carried)
        return F.mse_loss(self.head(carried[1])[..., :-1], x[:, :1, 1:])


class _Flow(_Module):
    """A normalising flow of affine couplings; the log-determinants add up along the layers."""

    class Coupling(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.turned = turned
            half = WIDTH // 2
            self.net = nn.Sequential(nn.Linear(half, 24), nn.Tanh(), nn.Linear(24, WIDTH))

        def forward(self, x: Tensor, log_determinant: Tensor) -> tuple[Tensor, Tensor]:
            kept, changed = x.chunk(2, 1)[:: -1 if self.turned else 1]
            scale, shift = self.net(kept).chunk(2, 1)
            changed = changed * scale.tanh().exp() + shift
            joined = (changed, kept) if self.turned else (kept, changed)
            return torch.cat(joined, 1), log_determinant + scale.tanh().sum(1)

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList([self.Coupling(bool(i % 2)) for i in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        z, log_determinant = batch, batch.new_zeros(len(batch))
        for coupling in self.couplings:
            z, log_determinant = coupling(z, log_determinant)
        return (z.square().sum(1) / 2 - log_determinant).mean()


class _Distillation(_Module):
    """A frozen teacher beside the student, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()

        def chain(width: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
            )

        self.teacher = chain(8).eval().requires_grad_(False)
        self.student = chain(12)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            wanted = self.teacher(x).softmax(-1)
        logits = self.student(x)
        return F.cross_entropy(logits, y) + F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.05)


class _MultiTask(_Module):
    """Two heads, a trainable weight for each of two losses, two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(4)))
        self.classes, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        features = self.trunk(x)
        first = F.cross_entropy(self.classes(features), y)
        second = F.mse_loss(self.value(features)[:, 0], x.mean(1))
        return (torch.stack([first, second]) * (-self.log_variances).exp() + self.log_variances).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        others = [*self.classes.parameters(), *self.value.parameters(), self.log_variances]
        groups: list[dict[str, Any]] = [
            {"params": list(self.trunk.parameters()), "lr": 0.05},
            {"params": others, "lr": 0.01},
        ]
        return torch.optim.SGD(groups)


class _Graphs(_Module):
    """Graph convolutions over small graphs, each with its own adjacency matrix."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, graph: dict[str, Tensor]) -> dict[str, Tensor]:
            nodes = graph["adjacency"] @ self.linear(graph["nodes"])
            return {**graph, "nodes": nodes.relu()}

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*(self.Convolution() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        graph = {"nodes": batch["nodes"], "adjacency": batch["adjacency"].softmax(-1)}
        return F.cross_entropy(self.head(self.convolutions(graph)["nodes"].sum(1)), batch["classes"])


class _Recurrence(_Module):
    """One cell, applied again and again, and layers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        state = x.new_zeros(len(x), WIDTH)
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return F.cross_entropy(self.layers(state), y)


class _Triplets(_Module):
    """One chain that is applied three times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        anchor, near, far = (self.embed(part) for part in batch.unbind(1))
        return F.triplet_margin_loss(anchor, near, far)


class _Whitened(_Module):
    """A loss over the correlations within a batch (Barlow Twins): its samples cannot be taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        features = self.layers(batch)
        correlations = features.T @ features / len(features)
        return (correlations - torch.eye(4).to(correlations)).square().sum()


class _Adversaries(_Module):
    """Lightning's example of a GAN: two optimizers, manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()  # type: ignore[attr-defined]
        made = self.generator(batch[:, :4])
        for_generator.zero_grad()
        self.manual_backward(F.softplus(-self.critic(made)).mean())
        for_generator.step()
        for_critic.zero_grad()
        real, false = self.critic(batch), self.critic(made.detach())
        self.manual_backward((F.softplus(-real) + F.softplus(false)).mean())
        for_critic.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.critic)]


class _Sparse(_Module):
    """Skip-gram with sparse gradients of its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.context = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        word, context = batch
        return F.cross_entropy(self.context(self.words(word)), context)


class _ResNet(_Module):
    """Residual blocks with BatchNorm, whose statistics are those of a micro-batch."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.norm(self.convolution(x))).relu()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(self.Block() for _ in range(4)))
        self.head = nn.Linear(4, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = self.blocks(self.stem(batch["pixel_values"])).mean((2, 3))
        return F.cross_entropy(self.head(features), batch["labels"])


def _vectors() -> Tensor:
    return _normal(WIDTH)


def _vectors_and_classes() -> tuple[Tensor, Tensor]:
    return _normal(WIDTH), _classes(4)


def _sequences() -> Tensor:
    return _normal(LENGTH, WIDTH)


def _sequences_and_classes() -> tuple[Tensor, Tensor]:
    return _normal(LENGTH, WIDTH), _classes(4)


def _graphs() -> dict[str, Tensor]:
    return {"nodes": _normal(5, WIDTH), "adjacency": _normal(5, 5, seed=_SEED + 2), "classes": _classes(4)}


_hf = _of_transformers
_OWN_SAMPLES = "the loss compares the samples of a device's part of the batch only; verify_steps=1 refuses it"
_STATISTICS = "BatchNorm's statistics are those of a device's part or of a micro-batch"

STRANGERS: tuple[Stranger, ...] = (
    Stranger("ALBERT, masked tokens", _hf("AlbertConfig", "AlbertForMaskedLM", embedding_size=8), _text),
    Stranger("DeBERTa v2, classes", _hf("DebertaV2Config", "DebertaV2ForSequenceClassification"), _text_and_classes),
    Stranger("ELECTRA, classes", _hf("ElectraConfig", "ElectraForSequenceClassification"), _text_and_classes),
    Stranger("ModernBERT, masked tokens", _hf("ModernBertConfig", "ModernBertForMaskedLM", cls_token_id=0), _text),
    Stranger("FNet, masked tokens", _hf("FNetConfig", "FNetForMaskedLM"), _text),
    Stranger(
        "XLNet, next tokens",
        _hf("XLNetConfig", "XLNetLMHeadModel", "max_position_embeddings", d_model=WIDTH, n_layer=4, n_head=2),
        _text,
    ),
    Stranger(
        "BART, text to text",
        _hf("BartConfig", "BartForConditionalGeneration", decoder_start_token_id=0, **_SEQUENCES),
        _two_texts,
    ),
    Stranger(
        "Marian, text to text",
        _hf("MarianConfig", "MarianMTModel", decoder_start_token_id=0, **_SEQUENCES),
        _two_texts,
    ),
    Stranger("OPT", _hf("OPTConfig", "OPTForCausalLM", ffn_dim=32, word_embed_proj_dim=WIDTH), _text),
    Stranger("BLOOM", _hf("BloomConfig", "BloomForCausalLM", n_head=2, n_layer=4), _text),
    Stranger("GPT-NeoX", _hf("GPTNeoXConfig", "GPTNeoXForCausalLM"), _text),
    Stranger("Falcon", _hf("FalconConfig", "FalconForCausalLM"), _text),
    Stranger("OLMo 2", _hf("Olmo2Config", "Olmo2ForCausalLM"), _text),
    Stranger("Phi-3", _hf("Phi3Config", "Phi3ForCausalLM"), _text),
    Stranger(
        "Gemma 2",
        _hf("Gemma2Config", "Gemma2ForCausalLM", head_dim=8, num_key_value_heads=1, sliding_window=4),
        _text,
    ),
    Stranger(
        "DeepSeek V3, experts",
        _hf(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            first_k_dense_replace=1,
            experts_implementation="eager",  # the fused one knows no float64
        ),
        _text,
    ),
    Stranger("RWKV", _hf("RwkvConfig", "RwkvForCausalLM", attention_hidden_size=WIDTH, context_length=16), _text),
    Stranger(
        "RecurrentGemma",
        _hf("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", lru_width=WIDTH, attention_window_size=4),
        _text,
    ),
    Stranger("CLIP, contrastive", _clip, _text_and_images, known_difference=_OWN_SAMPLES),
    Stranger("DINOv2, classes", _hf("Dinov2Config", "Dinov2ForImageClassification", **_IMAGES), _images_and_classes),
    Stranger("BEiT, classes", _hf("BeitConfig", "BeitForImageClassification", **_IMAGES), _images_and_classes),
    Stranger(
        "SegFormer, pixels",
        _hf(
            "SegformerConfig",
            "SegformerForSemanticSegmentation",
            "num_attention_heads",
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=8,
            num_channels=3,
        ),
        lambda: {"pixel_values": _normal(3, 32, 32), "labels": _classes(2, 32, 32)},
        tuple(f"model.segformer.stages.{number}" for number in (1, 2, 3)),
        known_difference=_STATISTICS,
    ),
    Stranger(
        "PoolFormer, classes",
        _hf("PoolFormerConfig", "PoolFormerForImageClassification", depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16]),
        lambda: {"pixel_values": _normal(3, 32, 32), "labels": _classes(2)},
        tuple(f"model.poolformer.encoder.block.{number}.0" for number in (1, 2, 3)),
    ),
    Stranger(
        "MAE, pixels",
        _hf(
            "ViTMAEConfig",
            "ViTMAEForPreTraining",
            decoder_hidden_size=WIDTH,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
            **_IMAGES,
        ),
        lambda: {"pixel_values": _normal(3, 16, 16)},
        random=True,
    ),
    Stranger(
        "TimeSformer, videos",
        _hf("TimesformerConfig", "TimesformerForVideoClassification", num_frames=2, **_IMAGES),
        lambda: {"pixel_values": _normal(2, 3, 16, 16), "labels": _classes(2)},
    ),
    Stranger(
        "Audio Spectrogram Transformer",
        _hf("ASTConfig", "ASTForAudioClassification", max_length=16, num_mel_bins=16, patch_size=8),
        lambda: {"input_values": _normal(16, 16), "labels": _classes(2)},
    ),
    Stranger(
        "PatchTST, forecast",
        _hf(
            "PatchTSTConfig",
            "PatchTSTForPrediction",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
            d_model=WIDTH,
            ffn_dim=32,
            norm_type="layernorm",
        ),
        lambda: {"past_values": _normal(16, 2), "future_values": _normal(4, 2, seed=_SEED + 1)},
    ),
    Stranger(
        "Perceiver, masked tokens",
        _hf(
            "PerceiverConfig",
            "PerceiverForMaskedLM",
            num_latents=4,
            d_latents=WIDTH,
            d_model=WIDTH,
            num_self_attends_per_block=4,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
            qk_channels=WIDTH,
            v_channels=WIDTH,
        ),
        lambda: {"inputs": _tokens(length=16), "labels": _tokens(length=16)},
    ),
    Stranger(
        "Lightning's Transformer",
        _LightningTransformer,
        lambda: (_tokens(), _tokens(_SEED + 1)),
        tuple(f"model.transformer.{name}" for name in ("encoder.layers.1", "decoder.layers.0", "decoder.layers.1")),
    ),
    Stranger("Lightning's autoencoder", _Autoencoder, _vectors),
    Stranger("Lightning's GAN", _Adversaries, _vectors),
    Stranger("VAE", _VAE, _vectors, random=True),
    Stranger("MLP-Mixer", _Mixer, _sequences_and_classes),
    Stranger("WaveNet", _WaveNet, _sequences),
    Stranger("Normalising flow", _Flow, _vectors),
    Stranger("Distillation", _Distillation, _vectors_and_classes),
    Stranger("Multi-task, trained weights", _MultiTask, _vectors_and_classes),
    Stranger("Graph convolutions", _Graphs, _graphs),
    Stranger("Recurrent cell, then layers", _Recurrence, _sequences_and_classes),
    Stranger("Triplets", _Triplets, lambda: _normal(3, WIDTH)),
    Stranger("Barlow Twins", _Whitened, _vectors, known_difference=_OWN_SAMPLES),
    Stranger(
        "Skip-gram, sparse gradients", _Sparse, lambda: (_classes(VOCABULARY), _classes(VOCABULARY)), ("context",)
    ),
    Stranger("Residual blocks, BatchNorm", _ResNet, _images_and_classes, known_difference=_STATISTICS),
)
