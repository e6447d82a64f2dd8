// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"io"

	"instar/internal/content"
)

// NewContent returns the n bytes that /bytes/n?seed=SEED answers with. They
// follow from the seed alone (ChaCha8), so a client that makes them again
// verifies every byte.
func NewContent(seed uint64, n int64) io.Reader { return content.New(seed, n) }
