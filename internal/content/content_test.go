// SPDX-License-Identifier: Apache-2.0

package content

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

func TestVerify(t *testing.T) {
	const n = 100_000
	good, err := io.ReadAll(New(5, n))
	if err != nil || len(good) != n {
		t.Fatal(len(good), err)
	}
	with := func(change func([]byte) []byte) []byte { return change(bytes.Clone(good)) }
	broken := errors.New("broken")
	for _, tc := range []struct {
		name string
		r    io.Reader
		want error
	}{
		{"good", bytes.NewReader(good), nil},
		{"good, byte by byte", iotest.OneByteReader(bytes.NewReader(good)), nil},
		{"good, with the end at once", iotest.DataErrReader(bytes.NewReader(good)), nil},
		{"a bit at the start", bytes.NewReader(with(func(b []byte) []byte { b[0] ^= 1; return b })), ErrCorrupt},
		{"a bit at the end", bytes.NewReader(with(func(b []byte) []byte { b[n-1] ^= 0x80; return b })), ErrCorrupt},
		{"two bytes changed places", bytes.NewReader(with(func(b []byte) []byte { b[40_000], b[40_001] = b[40_001], b[40_000]; return b })), ErrCorrupt},
		{"a byte too many", bytes.NewReader(append(bytes.Clone(good), 0)), ErrCorrupt},
		{"a byte too few", bytes.NewReader(good[:n-1]), io.ErrUnexpectedEOF},
		{"nothing", bytes.NewReader(nil), io.ErrUnexpectedEOF},
		{"another seed", New(6, n), ErrCorrupt},
		{"an error", io.MultiReader(bytes.NewReader(good[:10]), iotest.ErrReader(broken)), broken},
	} {
		var last int64
		err := Verify(tc.r, 5, n, func(total int64) { last = total })
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
		if tc.want == nil && last != n {
			t.Errorf("%s: progress ended at %d", tc.name, last)
		}
	}
	if err := Verify(bytes.NewReader(nil), 5, 0, nil); err != nil {
		t.Errorf("nothing of nothing: %v", err)
	}
}
