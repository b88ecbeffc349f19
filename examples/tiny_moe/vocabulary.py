"""The tokenizer: byte-level byte-pair encoding learnt from the training text."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Iterable[str], vocabulary_size: int, maximum_length: int) -> PreTrainedTokenizerFast:
    """Learn the merges; the end-of-text token gets id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=maximum_length,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Iterable[str]) -> torch.Tensor:
    """One stream of token ids, shape [tokens]: an end-of-text token, then each document ended by another."""
    stream = [tokenizer.eos_token_id]
    for text in documents:
        stream += tokenizer.encode(text, add_special_tokens=False, verbose=False)
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream, dtype=torch.long)
