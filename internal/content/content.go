// SPDX-License-Identifier: Apache-2.0

// Package content is what the demonstration servers answer with and their load
// clients check: bytes that follow from a seed.
package content

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
)

// Max is the most bytes that one request may ask for.
const Max = 1 << 30

// ErrCorrupt says that a body is not what was asked for.
var ErrCorrupt = errors.New("body differs from what was asked for")

// New returns the n bytes that /bytes/n?seed=SEED answers with. They
// follow from the seed alone (ChaCha8), so a client that makes them again
// verifies every byte.
func New(seed uint64, n int64) io.Reader {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	return io.LimitReader(rand.NewChaCha8(key), n)
}

type buffers struct{ got, want []byte }

var bufferPool = sync.Pool{New: func() any {
	return &buffers{make([]byte, 32<<10), make([]byte, 32<<10)}
}}

// Verify reads r to the end and compares it with New(seed, n). It calls
// progress after each piece with the number of bytes read so far.
func Verify(r io.Reader, seed uint64, n int64, progress func(int64)) error {
	b := bufferPool.Get().(*buffers)
	defer bufferPool.Put(b)
	content := New(seed, n)
	var total int64
	for {
		got, err := r.Read(b.got)
		want, _ := io.ReadFull(content, b.want[:got])
		if want < got {
			return fmt.Errorf("%w: more than %d bytes", ErrCorrupt, n)
		}
		if !bytes.Equal(b.got[:got], b.want[:want]) {
			return fmt.Errorf("%w: within %d bytes after offset %d", ErrCorrupt, got, total)
		}
		total += int64(got)
		if progress != nil && got > 0 {
			progress(total)
		}
		if err == io.EOF {
			if total < n {
				return fmt.Errorf("body ends after %d of %d bytes: %w", total, n, io.ErrUnexpectedEOF)
			}
			return nil
		}
		if err != nil {
			return err
		}
	}
}
