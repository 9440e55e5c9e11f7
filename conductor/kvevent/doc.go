// Package kvevent reads and writes the KV events that serving engines and pools publish: which blocks of which tokens have been
// stored where, and which are gone. It reads every encoding that is out there, vLLM's and SGLang's positional and tagged
// ones, and RFC 1527's envelope of Mooncake's masters, from msgpack.
//
// One event that cannot be read never costs the rest of its batch, and what is not known is passed over: releases add
// fields and types of events. The memory of a [Batch] is used again by the next one, and so is that of an [Encoder], so that
// neither reading nor writing allocates anything.
package kvevent
