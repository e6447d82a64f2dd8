// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// NewCertificate makes a self-signed ECDSA P-256 certificate that is valid for
// localhost, 127.0.0.1 and ::1. With a seed the key follows from the seed
// alone, so that every generation that knows the seed presents the same key;
// without one the key is random.
func NewCertificate(seed []byte) (tls.Certificate, error) {
	key, err := newKey(seed)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make certificate key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make certificate: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "localhost"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(1, 0, 0),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
		DNSNames:              []string{"localhost"},
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

func newKey(seed []byte) (*ecdsa.PrivateKey, error) {
	if len(seed) == 0 {
		return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	}
	// Nearly every 32-byte string is a scalar of P-256; the rare one that is
	// not is skipped.
	for n := uint32(0); ; n++ {
		scalar := sha256.Sum256(binary.BigEndian.AppendUint32(bytes.Clone(seed), n))
		if key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), scalar[:]); err == nil {
			return key, nil
		}
	}
}

// LoadCertificate reads certificate and key from one PEM file. When the file
// does not exist it makes a certificate and writes it there, mode 0600; of
// several processes that do so at the same time one wins, and all return its
// certificate.
func LoadCertificate(file string) (tls.Certificate, error) {
	cert, err := readCertificate(file)
	if !errors.Is(err, fs.ErrNotExist) {
		return cert, err
	}
	if cert, err = NewCertificate(nil); err != nil {
		return cert, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		return cert, fmt.Errorf("encode certificate key: %w", err)
	}
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})
	data = append(data, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})...)

	tmp, err := os.CreateTemp(filepath.Dir(file), ".certificate-*")
	if err != nil {
		return cert, fmt.Errorf("save certificate: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Close()); err != nil {
		return cert, fmt.Errorf("save certificate: %w", err)
	}
	// A link, unlike a rename, does not replace the file of whoever was faster.
	if err := os.Link(tmp.Name(), file); err != nil && !errors.Is(err, fs.ErrExist) {
		return cert, fmt.Errorf("save certificate: %w", err)
	}
	return readCertificate(file)
}

func readCertificate(file string) (tls.Certificate, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("read certificate: %w", err)
	}
	cert, err := tls.X509KeyPair(data, data)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("read certificate %s: %w; it must hold certificate and key as PEM", file, err)
	}
	return cert, nil
}

// SPKIHash is the base64 SHA-256 of the certificate's public key: what
// Chromium's --ignore-certificate-errors-spki-list wants.
func SPKIHash(cert tls.Certificate) string {
	leaf := cert.Leaf
	if leaf == nil {
		var err error
		if leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return ""
		}
	}
	sum := sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	return base64.StdEncoding.EncodeToString(sum[:])
}
