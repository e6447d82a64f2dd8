// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// DefaultModules are kernel modules that the tests of this project use, and that a
// kernel would load itself if there was a modprobe.
var DefaultModules = []string{"veth", "inet_diag", "udp_diag", "tcp_diag", "unix_diag"}

// module is one that is to be loaded.
type module struct {
	name string
	code []byte
}

// modules returns those with the names, each after those that it depends on. What is
// built into the kernel needs none.
func (k *Kernel) modules(ctx context.Context, names []string) ([]module, error) {
	files, builtin, err := k.index()
	if err != nil {
		return nil, fmt.Errorf("list modules of Linux %s: %w", k.Release, err)
	}
	var ordered []module
	done := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		name = moduleName(name)
		if done[name] || builtin[name] {
			return nil
		}
		done[name] = true
		file := files[name]
		if file == "" {
			return fmt.Errorf("find module %s: Linux %s has none of that name", name, k.Release)
		}
		code, err := readModule(ctx, file)
		if err != nil {
			return fmt.Errorf("read module %s of Linux %s: %w", name, k.Release, err)
		}
		needed, err := dependencies(code)
		if err != nil {
			return fmt.Errorf("read module %s of Linux %s: %w", name, k.Release, err)
		}
		for _, n := range needed {
			if err := visit(n); err != nil {
				return err
			}
		}
		ordered = append(ordered, module{name, code})
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return ordered, nil
}

// index finds the files of modules, and the modules that are built in.
func (k *Kernel) index() (files map[string]string, builtin map[string]bool, err error) {
	files, builtin = map[string]string{}, map[string]bool{}
	err = filepath.WalkDir(k.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if d.Name() == "modules.builtin" {
			text, err := os.ReadFile(path)
			for line := range strings.Lines(string(text)) {
				builtin[moduleName(filepath.Base(strings.TrimSpace(line)))] = true
			}
			return err
		}
		if name, _, isModule := strings.Cut(d.Name(), ".ko"); isModule {
			files[moduleName(name)] = path
		}
		return nil
	})
	return files, builtin, err
}

// moduleName is a name as the kernel writes it.
func moduleName(name string) string {
	return strings.ReplaceAll(strings.TrimSuffix(name, ".ko"), "-", "_")
}

func readModule(ctx context.Context, file string) ([]byte, error) {
	switch filepath.Ext(file) {
	case ".ko":
		return os.ReadFile(file)
	case ".xz":
		code, err := exec.CommandContext(ctx, "xz", "-dc", file).Output()
		if errors.Is(err, exec.ErrNotFound) {
			err = fmt.Errorf("%w: install the package xz-utils", err)
		}
		return code, err
	default:
		return nil, fmt.Errorf("%s: unknown compression", filepath.Base(file))
	}
}

// dependencies are in the section .modinfo, strings NAME=VALUE that end with a zero.
func dependencies(code []byte) ([]string, error) {
	file, err := elf.NewFile(bytes.NewReader(code))
	if err != nil {
		return nil, err
	}
	section := file.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no section .modinfo")
	}
	text, err := section.Data()
	if err != nil {
		return nil, err
	}
	for line := range strings.SplitSeq(string(text), "\x00") {
		if list, ok := strings.CutPrefix(line, "depends="); ok && list != "" {
			return strings.Split(list, ","), nil
		}
	}
	return nil, nil
}
