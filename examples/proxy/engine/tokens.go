package engine

import (
	"encoding/binary"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// vocabulary is how many tokens there are.
const vocabulary = 128 << 10

// pieces cuts a text into words, each with the space before it, as tokenisers of language models do: what an answer adds to
// a prompt is cut then as it was made.
func pieces(text string) (all []string) {
	for len(text) > 0 {
		_, n := utf8.DecodeRuneInString(text)
		if i := strings.IndexFunc(text[n:], unicode.IsSpace); i >= 0 {
			n += i
		} else {
			n = len(text)
		}
		all = append(all, text[:n])
		text = text[n:]
	}
	return all
}

// tokenise gives the tokens of a text: hashes of its pieces. Two pieces may be the same token; a toy may have that.
func tokenise(text string) []uint32 {
	words := pieces(text)
	tokens := make([]uint32, len(words))
	for i, w := range words {
		tokens[i] = uint32(xxh3.HashString(w) % vocabulary)
	}
	return tokens
}

// message is one of a chat. Content is a text, or parts, of which those that are texts count.
type message struct {
	Role    string `json:"role"`
	Content any    `json:"content"`
}

// template renders a chat as a prompt.
func template(messages []message, generate bool) string {
	var b strings.Builder
	for _, m := range messages {
		b.WriteString(" <|" + m.Role + "|>")
		switch content := m.Content.(type) {
		case string:
			b.WriteString(" " + strings.TrimLeft(content, " "))
		case []any:
			for _, part := range content {
				if fields, ok := part.(map[string]any); ok {
					if text, ok := fields["text"].(string); ok {
						b.WriteString(" " + text)
					}
				}
			}
		}
		b.WriteString(" <|end|>")
	}
	if generate {
		b.WriteString(" <|assistant|>")
	}
	return b.String()
}

// words are what answers are made of.
var words = strings.Fields("the cache of a prefix is where its first block lies and every other follows what came before it " +
	"so that nobody computes twice what somebody has kept close by in time")

// word is the next one of an answer, which depends on what came before: the same prompt has the same answer.
func word(tokens []uint32) string {
	var b [4 * 4]byte
	for i, t := range tokens[max(0, len(tokens)-4):] {
		binary.LittleEndian.PutUint32(b[4*i:], t)
	}
	return " " + words[xxh3.HashSeed(b[:], uint64(len(tokens)))%uint64(len(words))]
}
