// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"instar/internal/debian"
	"instar/internal/kernel"
)

// Newest is the name of the series that is the newest there is a package of.
const Newest = "newest"

// Series are those that the project is tested on, oldest first.
var Series = []string{"5.10", "6.1", "6.12", "6.18", Newest}

// suites have kernels, one series each or several. All but the last have a list of
// packages that is small.
var suites = []struct {
	series string
	suite  debian.Suite
}{
	{"5.10", "bullseye-security"},
	{"6.1", "bookworm-security"},
	{"6.12", "trixie-security"},
	{"", "trixie-backports"}, // every other series
}

func suiteOf(series string) debian.Suite {
	for _, s := range suites {
		if s.series == series || s.series == "" {
			return s.suite
		}
	}
	return ""
}

// Kernel is a Linux that was fetched, or can be.
type Kernel struct {
	Release string       // as uname -r prints it
	Suite   debian.Suite // that has its package

	dir string // with what was unpacked
}

// cloud is the flavour for virtual machines: small, and with the drivers of QEMU.
const cloud = "-cloud-amd64"

// image matches the packages of kernels; those for debugging have another end.
var image = regexp.MustCompile(`^linux-image-(\d+\.\d+.*` + cloud + `)$`)

// newestOf finds the kernel of a series with the highest version among the names of
// packages.
func newestOf(series string, packages []string) (release string, ok bool) {
	for _, name := range packages {
		m := image.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		v, err := kernel.Parse(m[1])
		if err != nil || series != Newest && v.String() != series {
			continue
		}
		if release == "" || compareReleases(m[1], release) > 0 {
			release = m[1]
		}
	}
	return release, release != ""
}

// digits are the numbers in a release, which order it.
var digits = regexp.MustCompile(`\d+`)

func compareReleases(a, b string) int {
	numbers := func(release string) (all []int) {
		for _, text := range digits.FindAllString(strings.TrimSuffix(release, cloud), -1) {
			n, _ := strconv.Atoi(text) // as many digits as a version has
			all = append(all, n)
		}
		return all
	}
	return cmp.Or(slices.Compare(numbers(a), numbers(b)), cmp.Compare(a, b))
}

// Find looks up which kernel of a series, such as "6.1", is the newest packaged. It does
// not fetch it.
func Find(ctx context.Context, store *debian.Store, series string) (*Kernel, error) {
	if _, err := kernel.Parse(series); err != nil && series != Newest {
		return nil, fmt.Errorf("find kernel %q: want a series such as %s", series, strings.Join(Series, ", "))
	}
	suite := suiteOf(series)
	packages, err := store.Packages(ctx, suite)
	if err != nil {
		return nil, fmt.Errorf("find kernel %s: %w", series, err)
	}
	release, ok := newestOf(series, packages)
	if !ok {
		return nil, fmt.Errorf("find kernel %s: Debian suite %s has no package linux-image-%s*%s", series, suite, series, cloud)
	}
	return &Kernel{Release: release, Suite: suite, dir: store.Path(kernelKey(release))}, nil
}

func kernelKey(release string) string { return filepath.Join("kernels", release) }

// Cached says whether the kernel was fetched.
func (k *Kernel) Cached() bool {
	_, err := os.Stat(k.dir)
	return err == nil
}

// Fetch gets the kernel with its modules, when it is not there already.
func (k *Kernel) Fetch(ctx context.Context, store *debian.Store) error {
	_, err := store.Make(kernelKey(k.Release), func(dir string) error {
		names, err := store.Packages(ctx, k.Suite)
		if err != nil {
			return err
		}
		if err := store.Unpack(ctx, k.Suite, dir, packagesOf(k.Release, names)...); err != nil {
			return err
		}
		// Maps of symbols, and documentation.
		old, err := filepath.Glob(filepath.Join(dir, "boot", "System.map*"))
		if err != nil {
			return err
		}
		for _, path := range append(old, filepath.Join(dir, "usr", "share")) {
			if err := os.RemoveAll(path); err != nil {
				return err
			}
		}
		made := &Kernel{Release: k.Release, dir: dir}
		_, err = made.Image()
		return err
	})
	if err != nil {
		return fmt.Errorf("fetch Linux %s (Debian suite %s): %w", k.Release, k.Suite, err)
	}
	return nil
}

// packagesOf are those that a kernel comes in: since 7.2 there are several, and
// linux-image has nothing in it.
func packagesOf(release string, names []string) (packages []string) {
	for _, part := range []string{"image", "binary", "modules", "base"} {
		if name := "linux-" + part + "-" + release; slices.Contains(names, name) {
			packages = append(packages, name)
		}
	}
	return packages
}

// Image is the file to boot.
func (k *Kernel) Image() (string, error) {
	found := ""
	err := filepath.WalkDir(k.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasPrefix(d.Name(), "vmlinuz") {
			found = path
			return fs.SkipAll
		}
		return err
	})
	if err == nil && found == "" {
		err = errors.New("its packages have no file vmlinuz")
	}
	if err != nil {
		return "", fmt.Errorf("find image of Linux %s: %w", k.Release, err)
	}
	return found, nil
}
