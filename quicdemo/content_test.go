// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bytes"
	"crypto/ecdsa"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
)

const errnoPerm = syscall.EPERM

func TestVerify(t *testing.T) {
	const n = 100_000
	good, err := io.ReadAll(NewContent(5, n))
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
		{"a bit at the start", bytes.NewReader(with(func(b []byte) []byte { b[0] ^= 1; return b })), errCorrupt},
		{"a bit at the end", bytes.NewReader(with(func(b []byte) []byte { b[n-1] ^= 0x80; return b })), errCorrupt},
		{"two bytes changed places", bytes.NewReader(with(func(b []byte) []byte { b[40_000], b[40_001] = b[40_001], b[40_000]; return b })), errCorrupt},
		{"a byte too many", bytes.NewReader(append(bytes.Clone(good), 0)), errCorrupt},
		{"a byte too few", bytes.NewReader(good[:n-1]), io.ErrUnexpectedEOF},
		{"nothing", bytes.NewReader(nil), io.ErrUnexpectedEOF},
		{"another seed", NewContent(6, n), errCorrupt},
		{"an error", io.MultiReader(bytes.NewReader(good[:10]), iotest.ErrReader(broken)), broken},
	} {
		var last int64
		err := verify(tc.r, 5, n, func(total int64) { last = total })
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
		if tc.want == nil && last != n {
			t.Errorf("%s: progress ended at %d", tc.name, last)
		}
	}
	if err := verify(bytes.NewReader(nil), 5, 0, nil); err != nil {
		t.Errorf("nothing of nothing: %v", err)
	}
}

func TestCertificateSeed(t *testing.T) {
	make := func(seed string) *ecdsa.PrivateKey {
		c, err := NewCertificate([]byte(seed))
		if err != nil {
			t.Fatal(err)
		}
		return c.PrivateKey.(*ecdsa.PrivateKey)
	}
	if !make("a").Equal(make("a")) {
		t.Error("one seed, two keys")
	}
	if make("a").Equal(make("b")) || make("").Equal(make("")) {
		t.Error("keys are equal that should not be")
	}
}

// Processes that start at the same time agree on one certificate.
func TestLoadCertificateRace(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cert.pem")
	hashes := make(chan string, 8)
	var wg sync.WaitGroup
	for range cap(hashes) {
		wg.Go(func() {
			c, err := LoadCertificate(file)
			if err != nil {
				t.Error(err)
				return
			}
			hashes <- SPKIHash(c)
		})
	}
	wg.Wait()
	close(hashes)
	first := <-hashes
	for h := range hashes {
		if h != first {
			t.Errorf("certificates %s and %s", first, h)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(file, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadCertificate(file); err == nil {
		t.Error("took nonsense for a certificate")
	}
	if _, err := LoadCertificate(filepath.Join(dir, "no", "such", "folder")); err == nil {
		t.Error("made a certificate in a folder that does not exist")
	}
}
