// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"crypto/ecdsa"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

const errnoPerm = syscall.EPERM

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
