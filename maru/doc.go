// Package maru speaks the wire protocol of Maru's metadata server: ZeroMQ messages of one body each, a header of 16 bytes
// and a msgpack map. [Listen] serves Maru's clients, unmodified, from an [Index]; docs/MARU.md says what they are given
// beyond what Maru's own server gives them, and what they cannot be given.
package maru
