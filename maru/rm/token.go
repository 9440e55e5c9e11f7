package rm

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
)

// Secret is what tokens are made with. All members of a pool have the same one, for as long as there is a handle.
type Secret [32]byte

// Token is what a handle carries to show that its holder was told of it: the first 8 bytes of HMAC-SHA256 over region,
// offset, length and nonce, as u64 in little-endian, and the owner's name. The nonce is another one each time that the region
// is given, so that a handle of before opens nothing.
func (s *Secret) Token(region, offset, length, nonce uint64, owner string) uint64 {
	b := make([]byte, 0, 4*8+maxClientID)
	for _, v := range [...]uint64{region, offset, length, nonce} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	mac := hmac.New(sha256.New, s[:])
	mac.Write(append(b, owner...))
	return binary.LittleEndian.Uint64(mac.Sum(nil))
}
