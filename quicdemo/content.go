// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
)

// maxContent is the most bytes that one request may ask for.
const maxContent = 1 << 30

var errCorrupt = errors.New("body differs from what was asked for")

// NewContent returns the n bytes that /bytes/n?seed=SEED answers with. They
// follow from the seed alone (ChaCha8), so a client that makes them again
// verifies every byte.
func NewContent(seed uint64, n int64) io.Reader {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	return io.LimitReader(rand.NewChaCha8(key), n)
}

type buffers struct{ got, want []byte }

var bufferPool = sync.Pool{New: func() any {
	return &buffers{make([]byte, 32<<10), make([]byte, 32<<10)}
}}

// verify reads r to the end and compares it with NewContent(seed, n). It calls
// progress after each piece with the number of bytes read so far.
func verify(r io.Reader, seed uint64, n int64, progress func(int64)) error {
	b := bufferPool.Get().(*buffers)
	defer bufferPool.Put(b)
	content := NewContent(seed, n)
	var total int64
	for {
		got, err := r.Read(b.got)
		want, _ := io.ReadFull(content, b.want[:got])
		if want < got {
			return fmt.Errorf("%w: more than %d bytes", errCorrupt, n)
		}
		if !bytes.Equal(b.got[:got], b.want[:want]) {
			return fmt.Errorf("%w: within %d bytes after offset %d", errCorrupt, got, total)
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
